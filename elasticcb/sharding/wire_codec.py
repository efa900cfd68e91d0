"""Arrays in reduced precision for transfer (`--wire_dtype`), in both directions; used by workers and servers.

Movements, embedding rows and gradients of rows are sent as bfloat16 where they are float32. The receiver converts them
back to float32; the servers keep float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array, aligned, dtype_of
from elasticcb.settings import WireDtype
from elasticcb.sharding.array_names import MOVED, ROWS, TABLE, kind_of
from elasticcb.sharding.partition import VariableSpec


def narrowed(arrays: Mapping[str, Array], wire_dtype: WireDtype) -> dict[str, Array]:
    """The arrays of a frame in reduced precision, rounded to nearest."""
    if wire_dtype is WireDtype.SAME:
        return dict(arrays)
    return {
        name: array.astype(dtype_of(WireDtype.BFLOAT16.value))
        if array.dtype == np.float32 and (_is_rows(name) or kind_of(name) == MOVED)
        else array
        for name, array in arrays.items()
    }


def widened(arrays: Mapping[str, Array], specs: Sequence[VariableSpec]) -> dict[str, Array]:
    """The inverse of `narrowed`, except for rounding.

    Args:
        specs: variables of the model, whose dtypes the rows get.
    """
    found = dict(arrays)
    for name, array in arrays.items():
        if array.dtype.name == "bfloat16" and _dtype_before(name, specs) == "float32":
            found[name] = aligned(array.shape, np.float32)
            found[name][...] = array
    return found


def wire_dtype_of(name: str, what: str) -> WireDtype:
    """The requested precision; "" is `SAME`. Raises `WireError` for an unknown name.

    Args:
        what: the requested arrays, as text.
    """
    try:
        return WireDtype(name or WireDtype.SAME.value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in WireDtype)
        raise WireError(f"A request has invalid dtype {name!r} for {what}; expected one of {known}.") from None


def _is_rows(name: str) -> bool:
    """Whether an array contains rows [n, ...], or their gradients."""
    kind, _, key = name.partition("/")
    return key.isdecimal() if kind == TABLE else kind == ROWS and key.endswith("/values")


def _dtype_before(name: str, specs: Sequence[VariableSpec]) -> str:
    key = name.split("/")[1] if "/" in name else ""
    if kind_of(name) == MOVED:
        return key
    is_known = _is_rows(name) and key.isdecimal() and int(key) < len(specs)
    return specs[int(key)].dtype if is_known else ""
