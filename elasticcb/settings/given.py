"""What a user gave: reads flags, a config file or arguments of `Cluster` to settings, and names them in messages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from elasticcb.errors import UsageError
from elasticcb.settings.choices import Command
from elasticcb.settings.definition import Kind, build, nested
from elasticcb.settings.job import JobSettings
from elasticcb.settings.names import EVERYDAY, GROUPED, GROUPS, SETTINGS, written
from elasticcb.settings.texts import CoreLoader

_ALSO = ("follow.", "submission.", "export.")  # sections of a command that are not part of its job
_READ_LATER = frozenset({"cluster_spec"})  # the file's content is the setting
_SPELLINGS = {spelling: each.name for each in SETTINGS.values() for spelling in (each.name, *each.aliases)}
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class ConfigFile:
    """A config file: scalars as written, mappings as dicts, by the names of settings."""

    path: Path
    values: dict[str, Any]


@dataclass(frozen=True)
class Given:
    """The settings that a user gave to a command or a `Cluster`, by name. `in` asks whether a valid value was given.

    Attributes:
        problems: messages about invalid and missing values.
        values: the valid ones, converted; paths of files and folders are absolute.
        raw: values as given.
        file: the config file.
        from_file: names of settings that come from the config file.
    """

    command: Command
    in_program: bool = False
    file: Path | None = None
    problems: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    from_file: set[str] = field(default_factory=set)

    @classmethod
    def by_flags(cls, command: Command, flags: Mapping[str, str], config: ConfigFile | None = None) -> Given:
        """Reads the texts of flags, and a config file, which they override.

        An empty flag removes the config file's value, if the setting has none by default. Without a config file it
        would be a mistake, such as a variable of the shell that is not set.
        """
        given = cls(command, file=config.path if config else None)
        for name, text in flags.items():
            setting = SETTINGS[name]
            if config is not None and not text.strip() and setting.default is None:
                continue
            if command not in setting.commands:
                commands = ", ".join(sorted(each.value for each in setting.commands))
                given.problems.append(f"--{name} applies only to {commands}, not to `{command.value}`. Remove it.")
            else:
                given.raw[name] = text
        # One file may serve all commands: settings of other commands are ignored.
        for name, value in config.values.items() if config else ():
            if name not in flags and command in SETTINGS[name].commands:
                given.raw[name] = value
                given.from_file.add(name)
        for setting in SETTINGS.values():
            if setting.name in given.raw:
                given._read(setting.name)
            elif command in setting.needed:
                given.problems.append(f"--{setting.name} is missing: {setting.what}. `{command.value}` needs it.")
        return given

    @classmethod
    def by_arguments(cls, arguments: Mapping[str, Any]) -> Given:
        """Reads the arguments of a `Cluster`; defaults count as not given."""
        given = cls(Command.TRAIN, in_program=True)
        raw = {setting.name: arguments[name] for name, setting in EVERYDAY.items() if name in arguments}
        for name, group in GROUPS.items():
            options, first = arguments.get(name), GROUPED[name][0]
            if isinstance(options, group):
                raw |= {setting.name: getattr(options, setting.field) for setting in GROUPED[name]}
            elif options is not None:
                given.problems.append(
                    f"{name}={options!r} is invalid. Expected an elasticcb.{group.__name__}, such as "
                    f"elasticcb.{first.written(True, first.initial)}."
                )
        for name, value in raw.items():
            given.raw[name] = value
            given._read(name)
            if name in given and given.values[name] == SETTINGS[name].initial:
                del given.values[name], given.raw[name]
        return given

    def _read(self, name: str) -> None:
        setting, value = SETTINGS[name], self.raw[name]
        if not self.in_program and isinstance(value, str) and not value.strip():
            instead = "remove it" if setting.default is None else f"{setting.default!r}, its default"
            self.problems.append(f'{self.name(name)} is empty (""). Expected {setting.what_it_takes}; or {instead}.')
            return
        read, expected = setting.read(value, None if self.in_program else self.base(name))
        if expected:
            self.problems.append(f"{self.shown(name)} is invalid. {expected}")
        else:
            self.values[name] = read

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        """The value given, or the default; "" and None stand for none."""
        return self.values.get(name, SETTINGS[name].initial)

    def base(self, name: str) -> Path:
        """The base of a relative path given for `name`."""
        return self.file.parent if self.file and name in self.from_file else Path.cwd()

    def path(self, name: str) -> Path | None:
        """The absolute path given for `name`; None if none was given. Links are not followed."""
        return Path(self[name]) if self[name] else None

    def name(self, name: str) -> str:
        """A setting with its place, for messages: "--num_ps (in /home/me/job.yaml)"."""
        return SETTINGS[name].written(self.in_program) + self._place(name)

    def shown(self, name: str) -> str:
        """A setting with its value and place, for messages: "--num_ps=0 (in /home/me/job.yaml)"."""
        setting = SETTINGS[name]
        return setting.written(self.in_program, self.raw.get(name, setting.initial)) + self._place(name)

    def _place(self, name: str) -> str:
        return f" (in {self.file})" if name in self.from_file else ""

    def written(self, text: str) -> str:
        """A text in which `{num_ps}` and `{updates:local}` stand for settings."""
        return written(text, self.in_program)

    def of(self, section: str) -> dict[str, Any]:
        """The values of a section, by field."""
        return {
            SETTINGS[name].field: value
            for name, value in self.values.items()
            if SETTINGS[name].path.startswith(f"{section}.")
        }

    def settings(self) -> JobSettings:
        """The settings of the job, without those that follow from others."""
        paths = {SETTINGS[name].path: value for name, value in self.values.items() if name not in _READ_LATER}
        values = nested({path: value for path, value in paths.items() if not path.startswith(_ALSO)})
        settings: JobSettings = build(JobSettings, {"command": self.command, **values})
        return settings

    def replaced(self, name: str, value: Any) -> Given:
        """The same with another value."""
        return replace(self, values=self.values | {name: value}, raw=self.raw | {name: value})


def place_of(name: str, value: Any) -> str:
    """How to pass a setting that `Cluster` takes in a group; "" if it is not such a setting."""
    for group, settings in GROUPED.items():
        for setting in settings:
            if name in (setting.name, setting.field):
                return (
                    f"{name}={value!r} belongs in `{group}`: Cluster({group}=elasticcb.{setting.written(True, value)})."
                )
    return ""


def read_config(path: Path) -> ConfigFile:
    """Reads `path`.

    Raises:
        UsageError: the file can't be read, is not a YAML mapping, or contains an unknown or repeated name or a
            malformed value. The message gives the line.
    """
    path = path.absolute()
    try:
        loader = CoreLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"The config file {path} can't be read: {reason}. Expected a YAML file with names of flags."
        ) from error
    except yaml.YAMLError as error:
        raise UsageError(_yaml_message(path, error)) from error
    if root is None:
        return ConfigFile(path, {})
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(
            f"{path} contains no flags. Expected lines of the form `name: value`, such as `num_workers: 2`."
        )
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in root.value:
        place = f"{path}:{key.start_mark.line + 1}"
        try:
            name = _canonical_name(key, place)
            if name in values:
                raise UsageError(f"{place}: {key.value!r} is given twice. Remove one of the two.")
            values[name] = _value(loader, name, value, place)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    return ConfigFile(path, values)


def _yaml_message(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    return f"{place}: invalid YAML: {getattr(error, 'problem', None) or error}. Fix that line."


def _canonical_name(key: yaml.Node, place: str) -> str:
    given = str(key.value)
    name = normalize(given.removeprefix("--"))
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    close = difflib.get_close_matches(name, _SPELLINGS, n=2, cutoff=0.75)
    hint = f"Did you mean {' or '.join(close)}?" if close else "`elasticcb train --help` lists all names."
    raise UsageError(f"{place}: unknown flag {given!r}. {hint}")


def normalize(text: str) -> str:
    """`num-ps` and `num_ps` are the same name."""
    return text.replace("-", "_")


def _value(loader: CoreLoader, name: str, node: yaml.Node, place: str) -> Any:
    kind = SETTINGS[name].kind
    if isinstance(node, yaml.ScalarNode):
        if node.tag == _NULL and not node.style:
            raise UsageError(f"{place}: {name} has no value. Add a value, or remove the line.")
        # The text as written, not as YAML parses it: it has the same meaning as on the command line.
        return node.value
    if kind in (Kind.PARAMS, Kind.MAPPING) and isinstance(node, yaml.MappingNode):
        try:
            return loader.construct_mapping(node, deep=True)
        except yaml.YAMLError as error:
            raise UsageError(_yaml_message(Path(place.rpartition(":")[0]), error)) from error
    if kind is Kind.DATA and isinstance(node, yaml.SequenceNode):
        items = [item.value for item in node.value if isinstance(item, yaml.ScalarNode) and item.value]
        if len(items) == len(node.value):
            return ",".join(items)
    form = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    expected = {Kind.PARAMS: "a mapping", Kind.DATA: "a path, or a list of paths", Kind.MAPPING: "a mapping"}
    raise UsageError(f"{place}: {name} is {form}. Expected {expected.get(kind, 'one value')}.")
