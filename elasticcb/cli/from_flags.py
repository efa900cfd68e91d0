"""Converts flags to settings."""

from __future__ import annotations

import contextlib
from typing import Any

from elasticcb.cli.given_flags import GivenFlags
from elasticcb.cli.options import BY_PATH, options_of
from elasticcb.errors import UsageError
from elasticcb.settings import Command, JobSettings, WorkerRange
from elasticcb.settings.definition import AUTO, Kind, build, nested

READ_LATER = frozenset({"cluster_spec"})  # the file's content is the setting


def values_of(command: Command, given: GivenFlags, section: str = "") -> dict[str, Any]:
    """The settings that were given, by path below `section`; paths of files and folders are absolute."""
    values: dict[str, Any] = {}
    prefix = f"{section}." if section else ""
    for option in options_of([command]):
        value = given[option.name]
        if option.name not in given or value is None or option.name in READ_LATER or not option.path.startswith(prefix):
            continue
        if option.may_be_auto and value == AUTO:
            continue
        if option.kind in (Kind.FOLDER, Kind.FILE):
            value = given.folder(option.name)
        elif option.hint is WorkerRange:
            with contextlib.suppress(UsageError):  # `validate` reports it
                values[option.path.removeprefix(prefix)] = WorkerRange.of(value)
            continue
        values[option.path.removeprefix(prefix)] = value
    return values


def settings_from(command: Command, given: GivenFlags) -> JobSettings:
    """The settings from flags, unchecked and without derived values."""
    values = {path: value for path, value in values_of(command, given).items() if not path.startswith(_BESIDE)}
    settings: JobSettings = build(JobSettings, {"command": command, **nested(values)})
    return settings


_BESIDE = ("follow.", "submission.", "export.")  # sections that are not part of a job's settings


class SaidByFlags:
    """Names settings by their flags in messages of checks."""

    def __init__(self, command: Command, given: GivenFlags) -> None:
        self._command, self._given = command, given

    def __contains__(self, path: str) -> bool:
        return self._command in BY_PATH[path].commands and BY_PATH[path].name in self._given

    def name(self, path: str) -> str:
        return f"--{BY_PATH[path].name}"

    def with_value(self, path: str) -> str:
        return self._given.flag(BY_PATH[path].name, with_value=True)

    def as_given(self, path: str, value: Any) -> str:
        return f"{self.name(path)}={str(value).lower() if isinstance(value, bool) else value}"
