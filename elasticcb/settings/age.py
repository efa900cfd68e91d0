"""Maximum age of a row of an embedding table: a number of model versions, or a time."""

from __future__ import annotations

import operator
import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_TIME = re.compile(rf"([1-9]\d*)([{''.join(_SECONDS)}])")
EXPECTED = "Expected a number of versions, such as 10000, or a time, such as 30m, 12h or 7d; 0 means never."


def read_age(value: object) -> int | str | None:
    """Parses an age: an integer number of versions, or a text such as "7d"; None if `value` is neither."""
    if isinstance(value, str):
        text = value.strip()
        return text if _TIME.fullmatch(text) else int(text) if text.isdecimal() else None
    try:
        versions = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return versions if versions >= 0 and not isinstance(value, bool) else None


def seconds_of(age: int | str) -> int:
    """A time in seconds; 0: `age` is a number of versions."""
    found = _TIME.fullmatch(age) if isinstance(age, str) else None
    return int(found[1]) * _SECONDS[found[2]] if found else 0
