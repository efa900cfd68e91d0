"""Settings are fields of sections; their metadata defines flags, arguments, checks and tables of the docs.

In help texts, `{num_ps}` and `{updates:local}` stand for other settings, by name (`names.py`).
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from elasticcb.errors import UsageError
from elasticcb.settings.choices import EXPECTED, Command, WorkerRange, read_age
from elasticcb.settings.texts import check_params, parse_integer, parse_mapping, parse_number, parse_params, parse_truth

TRAIN = frozenset({Command.TRAIN})
TRAIN_AND_EVALUATE = frozenset({Command.TRAIN, Command.EVALUATE})
EVALUATE = frozenset({Command.EVALUATE})
PREDICT = frozenset({Command.PREDICT})
ALL = TRAIN | EVALUATE | PREDICT

MODEL = "Model file"
DATA = "Data"
TRAINING = "Training"
EMBEDDING = "Embedding tables"
TASKS = "Batches and tasks"
CHECKPOINTS = "Checkpoints and export"
CLUSTER = "Cluster"
KUBERNETES = "Kubernetes"
JOB = "Job"
AUTO = "auto"  # the default text of a setting that the job can determine while it runs
PANELS = (MODEL, DATA, TRAINING, EMBEDDING, TASKS, CHECKPOINTS, CLUSTER, KUBERNETES, JOB)


class Kind(Enum):
    """The kind of a value; its text is shown to users when a setting has no better unit."""

    TEXT = "TEXT"
    NAME = "NAME"  # a name in the model file
    INTEGER = "INTEGER"
    NUMBER = "NUMBER"
    TRUTH = "true|false"
    CHOICE = "CHOICE"
    PARAMS = "K=V;K2=V2"
    FOLDER = "FOLDER"
    FILE = "FILE"
    DATA = "DATA"
    MAPPING = "YAML"  # of mappings
    AGE = "VERSIONS|TIME"
    RANGE = "MIN..MAX"


_KIND_OF = {bool: Kind.TRUTH, int: Kind.INTEGER, float: Kind.NUMBER, dict: Kind.PARAMS, WorkerRange: Kind.RANGE}
_PARSERS: dict[Kind, Callable[[str], Any]] = {
    Kind.TRUTH: parse_truth,
    Kind.INTEGER: parse_integer,
    Kind.NUMBER: parse_number,
    Kind.PARAMS: parse_params,
    Kind.MAPPING: parse_mapping,
}
_EXPECTED = {
    Kind.TRUTH: "true or false",
    Kind.INTEGER: "a whole number",
    Kind.NUMBER: "a number",
    Kind.NAME: "a name",
    Kind.PARAMS: "a mapping",
    Kind.MAPPING: "a mapping, such as {users: {min_count: 3}}",
    Kind.DATA: "a file, folder, glob or URL",
    Kind.FOLDER: "a folder",
    Kind.FILE: "a file",
}
ONLY_NAME = object()  # no value


class Section:
    """A frozen dataclass of settings. It may inherit from several sections, each with one subject."""

    PANEL: ClassVar[str] = ""  # the heading of its flags in the help
    COMMANDS: ClassVar[frozenset[Command]] = ALL  # commands that take them
    GROUP: ClassVar[str] = ""  # the argument of `Cluster` that takes its own fields


def setting(default: Any, help: str, **more: Any) -> Any:
    """Declares a field of a section, with its flag."""
    described = {"setting": {"help": help, **more}}
    if default is dict:
        return field(default_factory=dict, metadata=described)
    return field(default=default, metadata=described)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, with what flags, keys of config files, arguments, checks and the docs need to know."""

    path: str  # "section.field", or "field"
    owner: type  # class that defines the field
    hint: Any  # type of the field
    initial: Any  # its default, for a choice as text; None if a factory makes it
    kind: Kind
    panel: str
    commands: frozenset[Command]  # that take it
    help: str
    name: str  # of the flag and in config files; settings are identified by it
    aliases: tuple[str, ...] = ()  # of the flag
    unit: str = ""  # placeholder of the value in the help
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive minimum
    pattern: str = ""  # for texts
    expected: str = ""  # what the pattern allows, for messages
    because: str = ""  # why there is a limit, as a sentence
    default_text: str = ""  # where the default is determined at run time
    needed: frozenset[Command] = frozenset()  # commands that require it
    what: str = ""  # what it is, for the message that it is missing
    roles: tuple[str, ...] = ()  # roles whose commands, for manually started processes, take it as well
    argument: str = ""  # of `Cluster`, if it is not in a group

    @property
    def group(self) -> str:
        """The argument of `Cluster` that takes it; "": it is an argument of its own, or only a flag."""
        return "" if self.argument else vars(self.owner).get("GROUP", "")

    def written(self, in_program: bool, value: Any = ONLY_NAME) -> str:
        """How a user writes it: "--num_ps=2" or "num_ps=2"; without a value, its name."""
        value = _plain(value)
        if not in_program:
            shown = str(value).lower() if isinstance(value, bool) else value
            return f"--{self.name}" if value is ONLY_NAME else f"--{self.name}={shown}"
        if self.group:
            group = self.owner.__name__
            return f"{group}.{self.field}" if value is ONLY_NAME else f"{group}({self.field}={value!r})"
        name = self.argument or self.field
        return name if value is ONLY_NAME else f"{name}={value!r}"

    @property
    def may_be_auto(self) -> bool:
        """Whether "auto" is a valid value, stored as None."""
        return self.default_text == AUTO

    @property
    def field(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def default(self) -> Any:
        """The default as on the command line; None if it is empty or determined at run time."""
        if isinstance(self.initial, bool):
            return str(self.initial).lower()
        return None if self.initial == "" or dataclasses.is_dataclass(self.initial) else self.initial

    @property
    def metavar(self) -> str:
        return self.unit or "|".join(self.choices) or self.kind.value

    def beyond_limits(self, value: Any) -> str:
        """Says what is expected instead of an invalid value of the right type; "" if it is valid."""
        if isinstance(value, str) or self.kind not in (Kind.INTEGER, Kind.NUMBER):
            fits = not self.pattern or not value or re.fullmatch(self.pattern, value)
            return "" if fits else f"Expected {self.expected}."
        if self.minimum is not None and value < self.minimum:
            expected = f"at least {self.minimum:g}"
        elif self.maximum is not None and value > self.maximum:
            expected = f"at most {self.maximum:g}"
        elif self.above is not None and not value > self.above:
            expected = f"more than {self.above:g}"
        elif not math.isfinite(value):
            expected = "a finite number"
        else:
            return ""
        return f"Expected {expected}.{' ' if self.because else ''}{self.because}"

    def read(self, value: Any, base: Path | None = None) -> tuple[Any, str]:
        """Converts a value for the field, and says what is expected instead; "" if it is valid.

        Args:
            value: from Python; or text, as on the command line.
            base: of relative paths in text; None: `value` is from Python.
        """
        if self.initial is None and (value is None or (self.may_be_auto and value == AUTO)):
            return None, ""
        try:
            if base is not None and isinstance(value, str) and self.kind in _PARSERS:
                value = _PARSERS[self.kind](value)
            return self._converted(value, base or Path())
        except UsageError as error:
            return value, str(error)

    def _converted(self, value: Any, base: Path) -> tuple[Any, str]:
        unlike = f"Expected {self.what_it_takes}."
        if self.kind is Kind.CHOICE:
            text = str(_plain(value)).lower()
            choice = next((each for each in self.choices if each.lower() == text), None)
            return (value, unlike) if choice is None else (choice, "")
        if self.kind is Kind.TRUTH:
            return value, "" if isinstance(value, bool) else unlike
        if self.kind in (Kind.INTEGER, Kind.NUMBER):
            try:
                number: float = operator.index(value) if self.kind is Kind.INTEGER else float(operator.pos(value))
            except (TypeError, ValueError):
                return value, unlike
            return number, unlike if isinstance(value, bool) else self.beyond_limits(number)
        if self.kind is Kind.AGE:
            age = read_age(value)
            return (value, EXPECTED) if age is None else (age, "")
        if self.kind is Kind.RANGE:
            return (value if isinstance(value, WorkerRange) else WorkerRange.of(value)), ""
        if self.kind in (Kind.PARAMS, Kind.MAPPING):
            if self.kind is Kind.PARAMS and isinstance(value, Mapping):
                check_params(value)
            return value, "" if isinstance(value, Mapping) else unlike
        if not isinstance(value, (str, os.PathLike)) or (self.kind not in _PATHS and not isinstance(value, str)):
            return value, "Expected text."
        if self.kind in _PATHS and value:
            path = os.fspath(value)
            return (path if "://" in path else os.path.abspath(base / Path(path).expanduser())), ""
        return value, self.beyond_limits(value)

    @property
    def what_it_takes(self) -> str:
        """The values that it takes, for messages."""
        choices = f"one of {', '.join(map(repr, self.choices))}"
        return (choices if self.choices else _EXPECTED.get(self.kind, "a value")) + (
            f", or {AUTO}" if self.may_be_auto else ""
        )


_PATHS = (Kind.FILE, Kind.FOLDER)


@cache
def settings_of(section: type, prefix: str = "") -> tuple[Setting, ...]:
    """All settings of a section and of the sections in it, in order of definition."""
    return tuple(_walk(section, prefix))


def _walk(section: type, prefix: str) -> Iterator[Setting]:
    hints, fields = get_type_hints(section), {each.name: each for each in dataclasses.fields(section)}
    for owner in (each for each in section.__mro__ if issubclass(each, Section)):
        for name in (each for each in getattr(owner, "__annotations__", ()) if each in fields):
            hint, described = hints[name], fields[name].metadata.get("setting")
            if isinstance(hint, type) and issubclass(hint, Section):
                yield from _walk(hint, f"{prefix}{name}.")
            elif described is not None:
                default = fields[name].default
                found = {
                    "name": name,
                    "kind": _kind(hint),
                    "panel": owner.PANEL,
                    "commands": owner.COMMANDS,
                    "choices": _choices(hint),
                    **described,
                }
                initial = None if default is dataclasses.MISSING else _plain(default)
                yield Setting(path=f"{prefix}{name}", owner=owner, hint=hint, initial=initial, **found)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _without_none(hint: Any) -> Any:
    """X of `X | None`; any other type as it is."""
    others = [each for each in get_args(hint) if each is not type(None)] if isinstance(hint, types.UnionType) else []
    return others[0] if len(others) == 1 else hint


def _kind(hint: Any) -> Kind:
    hint = _without_none(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Kind.CHOICE
    return _KIND_OF.get(get_origin(hint) or hint, Kind.TEXT)


def _choices(hint: Any) -> tuple[str, ...]:
    hint = _without_none(hint)
    return tuple(each.value for each in hint) if isinstance(hint, type) and issubclass(hint, Enum) else ()


def build(section: Any, values: Mapping[str, Any]) -> Any:
    """A section from plain values by field, as JSON has them; sections in it are mappings, enums their text.

    Raises:
        KeyError, TypeError, ValueError: a field is unknown or missing, or an enum lacks the value.
    """
    hints = get_type_hints(section)
    return section(**{name: _read(hints[name], value) for name, value in values.items()})


def _read(hint: Any, value: Any) -> Any:
    if value is None and isinstance(hint, types.UnionType):
        return None
    hint = _without_none(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value)
    return value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}, for `build`."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return found
