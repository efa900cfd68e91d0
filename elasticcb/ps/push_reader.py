"""Checks pushes as a whole, and averages them.

Nothing here changes the model, so a refused push leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array, all_finite, dtype_of
from elasticcb.sharding.flat_blocks import ADDED, first_non_finite
from elasticcb.sharding.partition import Slice, VariableSpec, block_sizes, check_blocks, layout
from elasticcb.sharding.push import Push, Rows


class PushReader:
    """Reads and checks the pushes for one server.

    Args:
        check_ids: raises `WireError` for ids that an embedding table, given by index, does not hold here.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        check_ids: Callable[[int, Array], None] = lambda table, ids: None,
    ) -> None:
        self._specs = specs
        self._check_ids = check_ids
        self._slices = slices
        self._parts = {part.variable: part for part in slices if specs[part.variable].trainable}

    def read(self, push: Push) -> Push:
        """The push as this server applies it; dense variables of other servers are ignored.

        Raises `WireError`, naming the variable and what was expected, for anything that does not fit this server's part
        of the model.
        """
        held = sorted(self._parts.keys() & {self._trainable(index) for index in push.dense})
        sizes = block_sizes(self._specs, self._slices, True, held)
        check_blocks(push.blocks, sizes, self._gradients_of(held))
        blocks = {dtype: push.blocks[dtype] for dtype in sizes}  # in a fixed order, whatever the worker's
        # Dtypes without changes are left out.
        sizes = {d: size for d, size in block_sizes(self._specs, self._slices, False).items() if d in push.state}
        check_blocks(push.state, sizes, "The non-trainable variables")
        for dtype in sorted({*sizes, *push.shares}):
            _check_shares(dtype, push.shares.get(dtype), sizes.get(dtype, 0))
        rows = {index: self._rows(self._trainable(index), given) for index, given in sorted(push.rows.items())}
        for index in rows:
            if index in held:
                raise WireError(
                    f"The push has both a dense gradient and rows of {self._specs[index].path!r}; it must "
                    "have only one of them."
                )
        if push.learning_rate is not None and not math.isfinite(push.learning_rate):
            raise WireError(f"The push has the learning rate {push.learning_rate}; it must be finite.")
        if push.batches and len(held) != len(self._parts):
            raise WireError(
                f"The push has local training movements of {len(held)} of the {len(self._parts)} variables that this "
                "server trains; it must have all of them."
            )
        updated = frozenset(map(self._trainable, {*push.updated, *push.dense, *push.rows}))
        return replace(push, dense=tuple(held), blocks=blocks, rows=rows, updated=updated)

    def non_finite(self, push: Push) -> str:
        """The path of a variable whose gradient has NaN or infinity; "" when all are finite."""
        path = first_non_finite(push.blocks, self._specs, self._slices, True, push.dense)
        if path:
            return path
        for index, rows in push.rows.items():
            if not all_finite(rows.values):
                return self._specs[index].path
        return first_non_finite(push.state, self._specs, self._slices, False, shares=push.shares)

    def mean(self, pushes: Sequence[Push]) -> Push:
        """The mean of the gradients; a variable missing in a push counts as zeros.

        Non-trainable variables move towards the mean of the values that the pushes set; non-float ones get the last
        value. The learning rate is the last one given.
        """
        if len(pushes) == 1:
            return pushes[0]
        count = len(pushes)
        dense = tuple(sorted({index for push in pushes for index in push.dense}))
        blocks = {
            dtype: _mean([self._widened(push, dense, dtype, size) for push in pushes], count)
            for dtype, size in block_sizes(self._specs, self._slices, True, dense).items()
        }
        rows: dict[int, Rows] = {}
        for index in sorted({index for push in pushes for index in push.rows}):
            given = [push.rows[index] for push in pushes if index in push.rows]
            merged = _mean_rows(given, count)
            if index in dense:
                self._add_rows(blocks, dense, index, merged)
            else:
                rows[index] = merged
        state, shares = {}, {}
        for dtype in sorted({dtype for push in pushes for dtype in push.state}):
            given_state = [(push.state[dtype], push.shares[dtype]) for push in pushes if dtype in push.state]
            state[dtype], shares[dtype] = _merge_state(given_state)
        rates = [push.learning_rate for push in pushes if push.learning_rate is not None]
        updated = frozenset().union(*(push.updated for push in pushes))
        base = max(push.state_base for push in pushes)
        return Push(dense, blocks, rows, state, shares, base, rates[-1] if rates else None, updated)

    def _widened(self, push: Push, dense: tuple[int, ...], dtype: str, size: int) -> Array:
        if push.dense == dense:
            return push.blocks[dtype]
        block = np.zeros(size, dtype_of(dtype))
        offsets = {part.variable: offset for part, _, offset in layout(self._specs, self._slices, True, push.dense)}
        for part, part_dtype, offset in layout(self._specs, self._slices, True, dense):
            if part_dtype == dtype and part.variable in offsets:
                source = offsets[part.variable]
                block[offset : offset + part.elements] = push.blocks[dtype][source : source + part.elements]
        return block

    def _add_rows(self, blocks: dict[str, Array], dense: tuple[int, ...], index: int, rows: Rows) -> None:
        for part, dtype, offset in layout(self._specs, self._slices, True, dense):
            if part.variable == index:
                view = blocks[dtype][offset : offset + part.elements]
                view.reshape(part.shape(self._specs[index]))[rows.ids] += rows.values

    def _trainable(self, index: int) -> int:
        if not 0 <= index < len(self._specs) or not self._specs[index].trainable:
            raise WireError(
                f"The push has variable {index}, but the model has {len(self._specs)} variables, and only trainable "
                "ones have gradients."
            )
        return index

    def _rows(self, index: int, given: Rows) -> Rows:
        spec = self._specs[index]
        part = self._parts.get(index)
        if part is None and not spec.table:
            raise WireError(f"The push has rows of {spec.path!r}, but this server has no part of this variable.")
        ids, values = given
        if not spec.shape:
            raise WireError(f"The push has rows of {spec.path!r}, but this variable is a scalar.")
        expected = (len(ids), *spec.shape[1:])
        if values.dtype != dtype_of(spec.dtype) or values.shape != expected:
            raise WireError(
                f"Row gradients of {spec.path!r}: expected {spec.dtype}{list(expected)}, got {_shown(values)}."
            )
        if part is None:
            self._check_ids(index, ids)
        else:
            first, last = part.row_range(spec)
            held = f" This server has rows {first} to {last} of {spec.rows}; ids are relative to the first of them."
            check_row_ids(ids, last - first, spec.path, held)
        return Rows(ids, values)

    def _gradients_of(self, held: Sequence[int]) -> str:
        paths = ", ".join(repr(self._specs[index].path) for index in held[:4])
        more = f" and {len(held) - 4} more" if len(held) > 4 else ""
        return f"Gradients of {paths or 'no variable'}{more}"


def check_row_ids(ids: Array, below: int | None, path: str, hint: str = "") -> None:
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
        raise WireError(f"Row id {wrong} of {path!r} is out of range: expected ids from 0{limit}.{hint}")
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


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype for sums: float32 for half precision."""
    return np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype


def _mean(blocks: Sequence[Array], count: int) -> Array:
    dtype = blocks[0].dtype
    total = blocks[0].astype(_wide(dtype))
    for block in blocks[1:]:
        total += block
    total /= count
    return total.astype(dtype, copy=False)


def _mean_rows(given: Sequence[Rows], count: int) -> Rows:
    ids = np.concatenate([rows.ids for rows in given])
    values = np.concatenate([rows.values for rows in given])
    dtype = values.dtype
    order = np.argsort(ids, kind="stable")
    ids, values = ids[order], values[order].astype(_wide(dtype), copy=False)
    if not len(ids):
        return Rows(ids, values.astype(dtype, copy=False))
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    total = np.add.reduceat(values, starts, axis=0)
    total /= count
    return Rows(ids[starts], total.astype(dtype, copy=False))


def _merge_state(given: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Merges the values that several pushes set, and their weights, into one."""
    values, shares = given[0]
    if len(given) == 1:
        return values, shares
    added = np.logical_or.reduce([share == ADDED for _, share in given])
    if added.any():
        total = sum(np.where(share == ADDED, block, np.zeros_like(block)) for block, share in given)
        kept = [(block, np.where(share == ADDED, np.float32(0), share)) for block, share in given]
        values, shares = _merge_state(kept)
        return np.where(added, total, values), np.where(added, np.float32(ADDED), shares)
    if values.dtype.kind in "fcV":
        total = np.zeros(values.shape, _wide(values.dtype))
        count = np.zeros(values.shape, np.int64)
        for block, share in given:
            np.add(total, block.astype(total.dtype, copy=False), out=total, where=share > 0)
            count += share > 0
            shares = np.maximum(shares, share)
        return (total / np.maximum(count, 1)).astype(values.dtype), shares
    for block, share in given[1:]:
        values, shares = np.where(share > 0, block, values), np.maximum(shares, share)
    return values, shares
