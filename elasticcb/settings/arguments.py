"""The arguments of `Cluster`: the common ones directly, the others in groups. Each is a field of the settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from elasticcb.settings.choices import Command
from elasticcb.settings.cluster import NetworkOptions, RecoveryOptions
from elasticcb.settings.definition import Kind, Section, Setting, build, nested, settings_of
from elasticcb.settings.job import CheckpointOptions, JobSettings
from elasticcb.settings.training import EmbeddingOptions, ExchangeOptions

GROUPS: dict[str, type[Section]] = {
    "exchange": ExchangeOptions,
    "checkpoint": CheckpointOptions,
    "embedding": EmbeddingOptions,
    "network": NetworkOptions,
    "recovery": RecoveryOptions,
}
_SETTINGS = settings_of(JobSettings)
EVERYDAY = {setting.argument: setting for setting in _SETTINGS if setting.argument}
GROUPED = {
    group: tuple(setting for setting in _SETTINGS if setting.owner is owner and not setting.argument)
    for group, owner in GROUPS.items()
}
_GROUP_OF = {setting.path: group for group, settings in GROUPED.items() for setting in settings}
_BY_PATH = {setting.path: setting for setting in _SETTINGS}
_BY_FLAG = {setting.name: setting for setting in _SETTINGS if setting.path in _GROUP_OF or setting.argument}


class Arguments:
    """The arguments of a `Cluster`, as settings for all its calls.

    Attributes:
        settings: an invalid value is replaced by the default.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.problems: list[str] = []
        self._given: dict[str, Any] = {}  # by path; only values other than the default
        values: dict[str, Any] = {}
        for setting, value in self._values(given):
            read, expected = setting.read(value)
            if expected:
                self.problems.append(f"{self.as_given(setting.path, value)} is invalid. {expected}")
            else:
                values[setting.path] = read
                if read != setting.initial:
                    self._given[setting.path] = value
        plain = {"command": Command.TRAIN, **nested(values)}
        self.settings: JobSettings = build(JobSettings, plain)

    def _values(self, given: Mapping[str, Any]) -> list[tuple[Setting, Any]]:
        found = [(setting, given[name]) for name, setting in EVERYDAY.items() if name in given]
        for name, group in GROUPS.items():
            options = given.get(name)
            if options is None:
                continue
            if isinstance(options, group):
                found += [(setting, getattr(options, setting.field)) for setting in GROUPED[name]]
            else:
                self.problems.append(
                    f"{name}={options!r} is invalid. Expected an elasticcb.{group.__name__}, such as "
                    f"elasticcb.{group.__name__}({GROUPED[name][0].field}={GROUPED[name][0].initial!r})."
                )
        return found

    def __contains__(self, path: str) -> bool:
        return path in self._given

    def name(self, path: str) -> str:
        return argument_name(_BY_PATH[path])

    def with_value(self, path: str) -> str:
        return self.as_given(path, self._given.get(path, _BY_PATH[path].initial))

    def as_given(self, path: str, value: Any) -> str:
        setting = _BY_PATH[path]
        if path in _GROUP_OF:
            return f"{setting.owner.__name__}({setting.field}={value!r})"
        return f"{setting.argument or setting.field}={value!r}"


def argument_name(setting: Setting) -> str:
    """The name of a setting in Python: "num_ps", "ExchangeOptions.max_staleness"."""
    if setting.path in _GROUP_OF:
        return f"{setting.owner.__name__}.{setting.field}"
    return setting.argument or setting.field


def in_a_program(text: str, quote: str = "") -> str:
    """Replaces flags in a text, such as "--num_ps=2", by arguments of `Cluster`, each surrounded by `quote`. Text
    in backticks is a command and stays."""

    def argument(flag: re.Match[str]) -> str:
        setting = _BY_FLAG.get(flag["name"] or "")
        if setting is None:
            return flag[0]
        value = "" if flag["value"] is None else f"={_as_literal(setting, flag['value'])}"
        return f"{quote}{argument_name(setting)}{value}{quote}"

    return re.sub(r"`[^`]*`|--(?P<name>[a-z_]+)\b(=(?P<value>[\w./:-]*[\w/]))?", argument, text)


def as_user_writes(text: str, settings: JobSettings) -> str:
    """A text about flags, with the names that this user knows: a job of `Cluster` (which has no model file) has
    arguments."""
    return text if settings.model.definition else in_a_program(text)


def _as_literal(setting: Setting, text: str) -> str:
    if setting.kind in (Kind.INTEGER, Kind.NUMBER) or (setting.kind is Kind.AGE and text.isdecimal()):
        return text
    return text.capitalize() if setting.kind is Kind.TRUTH else repr(text)


def where_now(name: str, value: Any) -> str:
    """How to pass a setting that `Cluster` takes in a group; "" if it is not such a setting."""
    for group, settings in GROUPED.items():
        for setting in settings:
            if name in (setting.name, setting.field):
                options = f"elasticcb.{GROUPS[group].__name__}({setting.field}={value!r})"
                return f"{name}={value!r} belongs in `{group}`: Cluster({group}={options})."
    return ""


for _owner in GROUPS.values():
    _owner.__doc__ = in_a_program(_owner.__doc__ or "")
