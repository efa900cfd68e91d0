"""Arrays in reduced precision for transfer (`--wire_dtype`), in both directions; used by workers and servers.

Gradients, movements and weights in float32 are sent as bfloat16, rounded to nearest. So are rows, or as 8-bit integers
with a scale per row. The receiver converts them back to float32; the servers keep float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array, aligned, dtype_of
from elasticcb.settings import WireDtype
from elasticcb.sharding.array_names import GRADIENTS, ROWS, SCALES, TABLE, WEIGHTS, kind_of, only, without
from elasticcb.sharding.partition import VariableSpec

_LARGEST = 127  # of an 8-bit integer
_PARTS = 256  # steps between two integers, for stochastic rounding
_SMALLEST_SCALE = 1e-36  # _PARTS divided by it is finite
_LEAST_ELEMENTS = 3  # of a row; shorter ones take no more bytes as bfloat16
_CHUNK_ROWS = 1024  # fits into the processor's cache
_BY_COLUMNS = 64  # for so few elements, NumPy finds the largest faster column by column


def narrowed(
    arrays: Mapping[str, Array], wire_dtype: WireDtype, noise: np.random.SFC64 | None = None
) -> dict[str, Array]:
    """The arrays of a frame in reduced precision.

    Args:
        noise: for stochastic rounding, so that the mean is preserved (QSGD, Alistarh et al. 2017); None: round to
            nearest.
    """
    if wire_dtype is WireDtype.SAME:
        return dict(arrays)
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        if array.dtype != np.float32 or not (_is_rows(name) or kind_of(name) in (GRADIENTS, WEIGHTS)):
            found[name] = array
        elif wire_dtype is WireDtype.INT8 and _is_rows(name) and _elements(array.shape) >= _LEAST_ELEMENTS:
            found[name], found[f"{SCALES}/{name}"] = _integers(array, noise)
        else:
            found[name] = array.astype(dtype_of(WireDtype.BFLOAT16.value))
    return found


def widened(arrays: Mapping[str, Array], specs: Sequence[VariableSpec]) -> dict[str, Array]:
    """The inverse of `narrowed`, except for rounding.

    Args:
        specs: variables of the model, whose dtypes the rows get.

    Raises `WireError`, naming the array, for integers without scales, and scales that don't fit.
    """
    scales = {name.partition("/")[2]: array for name, array in only(arrays, SCALES).items()}
    found = without(arrays, SCALES)
    for name in scales.keys() - found.keys():
        raise WireError(f"A message has scales of {name!r}, but no such array.")
    for name, array in found.items():
        if name in scales:
            found[name] = _scaled(name, array, scales[name])
        elif array.dtype.name == "bfloat16" and _dtype_before(name, specs) == "float32":
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
    if kind_of(name) in (GRADIENTS, WEIGHTS):
        return key
    is_known = _is_rows(name) and key.isdecimal() and int(key) < len(specs)
    return specs[int(key)].dtype if is_known else ""


def _elements(shape: tuple[int, ...]) -> int:
    """Per row."""
    return int(np.prod(shape[1:], dtype=np.int64)) if shape else 0


def _integers(rows: Array, noise: np.random.SFC64 | None) -> tuple[Array, Array]:
    """Rows as integers from -127 to 127 (int8, of the same shape), and the scale of each (bfloat16 [n]).

    The scale of a row with NaN or infinity is NaN, which makes the whole row NaN.
    """
    flat = rows.reshape(len(rows), _elements(rows.shape))
    integers, scales = np.empty(flat.shape, np.int8), np.empty(len(rows), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(rows), _CHUNK_ROWS):
            chunk = slice(first, first + _CHUNK_ROWS)
            scales[chunk] = _scales(flat[chunk])
            factors = np.divide(_PARTS, scales[chunk], out=np.zeros_like(scales[chunk]), where=scales[chunk] > 0)
            parts = flat[chunk] * factors[:, None]
            # At most 127 * 256, so that adding 255 does not overflow.
            fixed = np.rint(parts, out=parts).astype(np.int16)
            fixed += _PARTS // 2 if noise is None else _random_bytes(noise, fixed.size).reshape(fixed.shape)
            fixed >>= 8
            integers[chunk] = fixed
    return integers.reshape(rows.shape), scales.astype(dtype_of("bfloat16"))


def _scales(rows: Array) -> Array:
    """By row, float32: the largest magnitude / 127, rounded up to a bfloat16; 0 for a row of zeros."""
    magnitudes = np.abs(rows)
    if rows.shape[1] > _BY_COLUMNS:
        largest: Array = magnitudes.max(axis=1)
    else:
        largest = magnitudes[:, 0].copy()
        for column in magnitudes.T[1:]:
            np.maximum(largest, column, out=largest)
    scales = largest / np.float32(_LARGEST)
    scales[scales < _SMALLEST_SCALE] = 0
    scales[~np.isfinite(scales)] = np.nan
    bits = scales.view(np.uint32)
    bits += 0xFFFF  # the first half of a float32 is a bfloat16
    bits &= 0xFFFF0000
    return scales


def _random_bytes(noise: np.random.SFC64, count: int) -> Array:
    words: Array = noise.random_raw(-(-count // 8))
    return words.view(np.uint8)[:count]


def _scaled(name: str, integers: Array, scales: Array) -> Array:
    """The inverse of `_integers`, float32."""
    if not _is_rows(name) or integers.dtype != np.int8 or not integers.ndim:
        raise WireError(
            f"Received scales for {name!r}, which is {_shown(integers)}; only rows of int8 [n, ...] have them."
        )
    if scales.dtype.name != "bfloat16" or scales.shape != (len(integers),):
        raise WireError(
            f"The scales of {name!r} are {_shown(scales)}; expected bfloat16[{len(integers)}], one for each row."
        )
    wide: Any = scales.astype(np.float32)
    if (wide < 0).any():
        raise WireError(f"A scale of {name!r} is {wide.min():g}; it must be 0 or more, or NaN for a row with NaN.")
    rows = aligned(integers.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # for rows that are not finite
        np.multiply(integers, wide.reshape(-1, *[1] * (integers.ndim - 1)), out=rows)
    return rows


def _shown(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
