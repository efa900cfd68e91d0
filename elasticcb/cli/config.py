"""`--config job.yaml`: a file with the flags of a command under the same names."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elasticcb.cli.options import BY_NAME, CANONICAL, normalize
from elasticcb.cli.values import CoreLoader
from elasticcb.errors import UsageError
from elasticcb.settings.definition import Kind

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
