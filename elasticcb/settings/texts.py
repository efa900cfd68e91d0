"""Values as texts: of flags, and of scalars in a config file, which have the same meaning.

YAML 1.2's core rules, which is what people expect: `1e-3` is a number, `no` and `12:30` are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from elasticcb.errors import UsageError


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


# YAML 1.1 would read 010 as 8.
def _construct_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_integer)

_TRUTHS = dict.fromkeys(("true", "t", "1", "yes", "y", "on"), True)
_TRUTHS |= dict.fromkeys(("false", "f", "0", "no", "n", "off"), False)


def parse_truth(text: str) -> bool | str:
    return _TRUTHS.get(text.strip().lower(), text)


def parse_integer(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def parse_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def parse_scalar(text: str) -> Any:
    """`"64"` -> 64, `"1e-3"` -> 0.001, `"true"` -> True, `"null"` -> None, `"'64'"` -> "64", else text."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if not text:
        return ""
    loader = CoreLoader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return loader.construct_object(yaml.ScalarNode(tag, text))


_COLLECTION = re.compile(r"\{.*\}|\[.*\]", re.DOTALL)


def parse_params(text: str) -> dict[str, Any]:
    """`"k=v;k2=v2"` -> {"k": v, "k2": v2}; a quoted value may hold `;`, and a value may be a list or a mapping of YAML.

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
        found[name] = parse_mapping(value) if _COLLECTION.fullmatch(value.strip()) else parse_scalar(value)
    return found


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


def check_params(params: Mapping[Any, Any]) -> None:
    """Checks that a mapping can be used as arguments and sent to other processes.

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


def parse_mapping(text: str) -> Any:
    """Raises `UsageError` if it is not YAML."""
    try:
        return CoreLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise UsageError(f"It is not valid YAML: {getattr(error, 'problem', None) or error}.") from error
