"""`--config job.yaml`: a file with the flags of a command under the same names; and how values are parsed, in the same
way there and on the command line.

YAML 1.2's core rules, which is what people expect: `1e-3` is a number, `no` and `12:30` are text.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich_click as click
import yaml

from elasticcb.cli.options import BY_NAME, CANONICAL, normalize
from elasticcb.errors import UsageError
from elasticcb.settings.choices import EXPECTED, read_age
from elasticcb.settings.definition import AUTO, Kind


class CoreLoader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where `1e-3` is text, `no` is false, `12:30` is 750 and dates are objects."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN", "-+."),
    ("merge", r"<<", "<"),
):
    _starts = [*(letter for letter in _first if letter != "\0"), *([""] if "\0" in _first else [])]
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _starts)

_INTEGER = "tag:yaml.org,2002:int"


# YAML 1.1 would read 010 as 8.
def _construct_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


CoreLoader.add_constructor(_INTEGER, _construct_integer)


def parse_scalar(text: str) -> Any:
    """`"64"` -> 64, `"1e-3"` -> 0.001, `"true"` -> True, `"null"` -> None, `"'64'"` -> "64", else text."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if not text:
        return ""
    loader = CoreLoader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, text))


def parse_params(text: str) -> dict[str, Any]:
    """`"k=v;k2=v2"` -> {"k": v, "k2": v2}; a quoted value may hold `;`.

    Raises:
        UsageError: a part has no `=`, or its name is not a valid Python argument.
    """
    found: dict[str, Any] = {}
    for part in _split(text):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise UsageError(
                f"{part.strip()!r} is not of the form NAME=VALUE. Expected parts separated by semicolons, such as "
                '"units=64;rate=1e-3".'
            )
        if name in found:
            raise UsageError(f"{name!r} is given twice. Remove one of the two.")
        found[name] = parse_scalar(value)
    return found


def check_params(params: dict[Any, Any]) -> dict[str, Any]:
    """Checks that a mapping of a config file can be used as arguments and sent to other processes.

    Raises:
        UsageError: a key is not a name, or a value has another type than text, number, list and mapping.
    """
    for name, value in params.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f'{name!r} is not a valid argument name. Expected names such as "units".')
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{name!r} contains {value!r}. Expected text, numbers, true, false, null, lists or mappings."
            ) from error
    return params


class MappingText(click.ParamType):
    """YAML on the command line, a mapping in a config file."""

    name = "mapping"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[Any, Any]:
        try:
            found = value if isinstance(value, dict) else CoreLoader(value).get_single_data()
        except yaml.YAMLError as error:
            self.fail(f"{value!r} is not valid YAML: {getattr(error, 'problem', None) or error}.", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is not a mapping. Expected YAML such as '{{users: {{min_count: 3}}}}'.", param, ctx)
        return found


class AgeText(click.ParamType):
    """A number of versions, or a time."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        age = read_age(value)
        if age is None:
            self.fail(f"{value!r} is invalid. {EXPECTED}", param, ctx)
        return age


def _split(text: str) -> list[str]:
    parts: list[str] = [""]
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and parts[-1].rstrip().endswith("="):
            quote = letter
        elif letter == ";":
            parts.append("")
            continue
        parts[-1] += letter
    return [part for part in parts if part.strip()]


class Params(click.ParamType):
    """`k=v;k2=v2` on the command line, a mapping in a config file."""

    name = "params"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            return check_params(value) if isinstance(value, dict) else parse_params(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class OrAuto(click.ParamType):
    """A value of another type, or the word "auto"."""

    def __init__(self, other: click.ParamType) -> None:
        self._other, self.name = other, other.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == AUTO:
            return value
        try:
            return self._other.convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}, and not {AUTO!r} either.", param, ctx)


_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class ConfigFile:
    """A config file: scalars as written, mappings as dicts."""

    path: Path
    values: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.path.parent


def read_config(path: Path) -> ConfigFile:
    """Reads `path`.

    Raises:
        UsageError: the file can't be read, is not a YAML mapping, or contains an unknown or repeated name or a
            malformed value. The message gives the line.
    """
    path = path.absolute()
    loader = CoreLoader(_read(path))
    try:
        root = loader.get_single_node()
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"The config file {path} can't be read: {reason}. Expected a YAML file with names of flags."
        ) from error


def _yaml_message(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    return f"{place}: invalid YAML: {getattr(error, 'problem', None) or error}. Fix that line."


def _canonical_name(key: yaml.Node, place: str) -> str:
    given = str(key.value)
    name = normalize(given.removeprefix("--"))
    if name in CANONICAL:
        return CANONICAL[name]
    close = difflib.get_close_matches(name, CANONICAL, n=2, cutoff=0.75)
    hint = f"Did you mean {' or '.join(close)}?" if close else "`elasticcb train --help` lists all names."
    raise UsageError(f"{place}: unknown flag {given!r}. {hint}")


def _value(loader: CoreLoader, name: str, node: yaml.Node, place: str) -> Any:
    kind = BY_NAME[name].kind
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
    expected = {
        Kind.PARAMS: "a mapping",
        Kind.DATA: "a path, or a list of paths",
        Kind.MAPPING: "a mapping",
    }
    raise UsageError(f"{place}: {name} is {form}. Expected {expected.get(kind, 'one value')}.")
