"""Checks pushes as a whole, before anything is changed: a refused push leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.flat_blocks import ADDED
from elasticcb.sharding.partition import Slice, VariableSpec, block_sizes, check_blocks
from elasticcb.sharding.push import Push, Rows


class PushReader:
    """Checks the pushes for one server.

    Args:
        check_ids: raises `WireError` for ids that an embedding table, given by index, does not hold here.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        check_ids: Callable[[int, Array], None] = lambda table, ids: None,
    ) -> None:
        self._specs, self._check_ids = specs, check_ids
        self._moved, self._state = (block_sizes(specs, slices, trainable) for trainable in (True, False))

    def read(self, push: Push) -> Push:
        """The push as this server applies it.

        Raises `WireError`, naming the variable and what was expected, for anything that does not fit this server's part
        of the model.
        """
        if push.batches < 0:
            raise WireError(f"The push has {push.batches} batches; expected 0, for rows only, or more.")
        moved = self._moved if push.batches else {}
        check_blocks(push.moved, moved, "The movements of the trainable variables")
        # Dtypes without changes are left out.
        state = {dtype: size for dtype, size in self._state.items() if dtype in push.state}
        check_blocks(push.state, state, "The non-trainable variables")
        for dtype in sorted({*state, *push.shares}):
            _check_shares(dtype, push.shares.get(dtype), state.get(dtype, 0))
        rows = {index: self._rows(index, given) for index, given in sorted(push.rows.items())}
        # In a fixed order, whatever the worker's.
        return replace(push, moved={dtype: push.moved[dtype] for dtype in moved}, rows=rows)

    def _rows(self, index: int, given: Rows) -> Rows:
        if not 0 <= index < len(self._specs) or not self._specs[index].table:
            raise WireError(
                f"The push has rows of variable {index}, which is none of the embedding tables among the "
                f"{len(self._specs)} variables of the model."
            )
        spec, (ids, values) = self._specs[index], given
        expected = (*ids.shape[:1], *spec.shape[1:])
        if values.dtype != dtype_of(spec.dtype) or values.shape != expected:
            raise WireError(
                f"Row gradients of {spec.path!r}: expected {spec.dtype}{list(expected)}, got {_shown(values)}."
            )
        self._check_ids(index, ids)
        return given


def check_row_ids(ids: Array, below: int | None, path: str) -> None:
    """Raises `WireError`, naming the variable, unless `ids` are int64 [n], unique, and from 0 up to (excluding)
    `below`."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise WireError(f"Row ids of {path!r}: expected int64[n], got {_shown(ids)}.")
    if not len(ids):
        return
    ordered = np.sort(ids)
    wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
    if wrong < 0 or (below is not None and wrong >= below):
        limit = "" if below is None else f", below {below}"
        raise WireError(f"Row id {wrong} of {path!r} is out of range: expected ids from 0{limit}.")
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise WireError(
            f"Row id {repeated[0]} of {path!r} is repeated; the worker must send each row once, with the sum of "
            "its gradients."
        )


def _check_shares(dtype: str, shares: Array | None, size: int) -> None:
    if (
        shares is None
        or shares.dtype != np.float32
        or shares.shape != (size,)
        or not (((shares >= 0) & (shares <= 1)) | (shares == ADDED)).all()
    ):
        given = "nothing" if shares is None else _shown(shares)
        raise WireError(
            f"The shares by which the non-trainable variables of dtype {dtype} change are {given}; expected "
            f"float32[{size}] from 0 to 1, or {ADDED:g}."
        )


def _shown(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
