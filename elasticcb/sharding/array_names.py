"""Names of the arrays in frames and checkpoint files: "KIND/KEY", or "KIND/INDEX/NAME" (docs/wire_protocol.md).

Every kind is defined here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array

# By dtype, flat: a server's part of the trainable and of the non-trainable variables, and of a push.
WEIGHTS, STATE, MOVED, SHARES = "weights", "state", "moved", "shares"
# By variable: gradients of rows in a push; requested ids, and the data of an embedding table.
ROWS, WANTED, TABLE = "rows", "lookup", "table"
# Of optimizers: by variable and name, and by name only. SLOTS are also part of a TABLE.
SLOTS, EXTRAS, SHARED = "slots", "extras", "shared"
# In files, besides TABLE and those of optimizers: the part of a variable; of a table, ages and ids of removed rows.
WEIGHT, AGES, GONE = "weight", "ages", "gone"


def named(kind: str, arrays: Mapping[Any, Array]) -> dict[str, Array]:
    """The arrays with their full names; a key is a dtype, an index, or (index, name)."""
    return {
        f"{kind}/{key[0]}/{key[1]}" if isinstance(key, tuple) else f"{kind}/{key}": each for key, each in arrays.items()
    }


def kind_of(name: str) -> str:
    return name.partition("/")[0]


def of_kind(kind: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of a kind, by the rest of their names."""
    prefix = f"{kind}/"
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def only(arrays: Mapping[str, Array], *kinds: str) -> dict[str, Array]:
    """The arrays of these kinds, with their full names."""
    return {name: array for name, array in arrays.items() if kind_of(name) in kinds}


def without(arrays: Mapping[str, Array], *kinds: str) -> dict[str, Array]:
    """The arrays of other kinds, with their full names."""
    return {name: array for name, array in arrays.items() if kind_of(name) not in kinds}


def by_index(kind: str, arrays: Mapping[str, Array]) -> dict[int, Array]:
    """The arrays "KIND/INDEX", by index. Raises `WireError` for another name of the kind."""
    found = of_kind(kind, arrays)
    for key in found:
        if not key.isdecimal():
            raise WireError(f"An array is named {f'{kind}/{key}'!r}; expected {kind}/INDEX.")
    return {int(key): array for key, array in found.items()}


def by_index_and_name(kind: str, arrays: Mapping[str, Array]) -> dict[tuple[int, str], Array]:
    """The arrays "KIND/INDEX/NAME". Raises `WireError` for another name of the kind."""
    result = {}
    for key, array in of_kind(kind, arrays).items():
        index, _, name = key.partition("/")
        if not index.isdecimal() or not name:
            raise WireError(f"An array is named {f'{kind}/{key}'!r}; expected {kind}/INDEX/NAME.")
        result[int(index), name] = array
    return result
