"""Weights in wire format between workers and parameter servers: flat, by server and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from elasticcb.rpc.shared_frames import aligned_copy
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.array_names import STATE, WEIGHTS, kind_of, named, of_kind
from elasticcb.sharding.partition import Slice, VariableSpec, layout, pack, unpack

Blocks = list[dict[str, Array]]  # by server: "weights/DTYPE" and "state/DTYPE", flat

ADDED = 2.0  # the share of an element of `Movement.state` that is a difference, to be added
_ADDED = ("sum", "count", "only_first_replica")


class PlacedBlocks(list[dict[str, Array]]):
    """`Blocks` with their slices."""

    def __init__(self, blocks: Iterable[dict[str, Array]], partition: Sequence[Sequence[Slice]]) -> None:
        super().__init__(blocks)
        self.partition = partition


def recut(
    blocks: Sequence[Mapping[str, Array]],
    specs: Sequence[VariableSpec],
    before: Sequence[Sequence[Slice]],
    after: Sequence[Sequence[Slice]],
    trainable: bool,
) -> list[dict[str, Array]]:
    """Converts flat blocks of some servers to blocks for other servers. Missing parts are zeros."""
    whole: dict[int, Array] = {}
    for slices, own in zip(before, blocks, strict=True):
        for part, dtype, offset in layout(specs, slices, trainable):
            if dtype in own:
                flat = whole.setdefault(part.variable, np.zeros(specs[part.variable].elements, own[dtype].dtype))
                flat[part.start : part.stop] = own[dtype][offset : offset + part.elements]
    given = {specs[index].dtype: flat.dtype for index, flat in whole.items()}
    result = []
    for slices in after:
        pieces: dict[str, list[Array]] = {}
        for part, dtype, _ in layout(specs, slices, trainable):
            if dtype in given:
                zeros = np.zeros(specs[part.variable].elements, given[dtype])
                pieces.setdefault(dtype, []).append(whole.get(part.variable, zeros)[part.start : part.stop])
        result.append({dtype: np.concatenate(found) for dtype, found in pieces.items()})
    return result


def state_moves(
    blocks: Blocks,
    state: Sequence[Mapping[str, Array]],
    specs: Sequence[VariableSpec],
    parts: Sequence[Sequence[Slice]],
    decays: Mapping[int, float],
    is_first: bool = True,
) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
    """How a step that started with the state in `blocks` changed it: as `Movement.state` and `Movement.shares`.

    A variable's `aggregation`, as of Keras's variables, decides how changes by several workers count: differences add
    up ("sum"; "count": unless they are negative, as when a counter restarts), only those of the first worker count
    ("only_first_replica"), or the values that are set are averaged.

    Args:
        state: by server and dtype, the non-trainable variables after the step, flat.
        decays: of moving averages, by variable: the weight of the old value in the new one.
        is_first: whether this is the first worker.
    """
    towards, shares = [], []
    for slices, block, own in zip(parts, blocks, state, strict=True):
        before = of_kind(STATE, block)
        share = {dtype: _differs(new, before[dtype]).astype(np.float32) for dtype, new in own.items()}
        share = {dtype: flat for dtype, flat in share.items() if flat.any()}
        values = {dtype: own[dtype] for dtype in share}
        for part, dtype, offset in layout(specs, slices, False):
            decay, rule = decays.get(part.variable, 0.0), specs[part.variable].aggregation
            averages = 0 < decay < 1 and own[dtype].dtype.kind == "f"
            if dtype not in share or not (averages or rule in _ADDED):
                continue
            here = slice(offset, offset + part.elements)
            if values[dtype] is own[dtype]:
                values[dtype] = own[dtype].copy()
            if rule == "only_first_replica" and not is_first:
                share[dtype][here] = 0
            elif rule in _ADDED and own[dtype].dtype.kind != "b":
                old, new, changed = before[dtype][here], own[dtype][here], share[dtype][here] > 0
                added = changed & (new > old) if rule == "count" else changed
                values[dtype][here] = np.where(added, new - old, new)
                share[dtype][here] = np.where(added, ADDED, changed)
            elif averages:
                old, new = (flat[here].astype(np.float64) for flat in (before[dtype], own[dtype]))
                values[dtype][here] = np.where(share[dtype][here] > 0, (new - decay * old) / (1 - decay), new)
                share[dtype][here] *= 1 - decay
        towards.append(values)
        shares.append(share)
    return towards, shares


def _differs(now: Array, before: Array) -> Array:
    changed: Array = (now != before) & ((now == now) | (before == before))  # NaN that stays has not changed
    return changed


def moved_state(block: Array, values: Array, shares: Array, lag: float) -> Array:
    """Non-trainable variables after a step that may have started with older ones, as a new array.

    Each float value stays between its current value and the values that steps set, however late a push is. Non-float
    values can't be averaged, and are set.

    Args:
        block: current values, flat.
        values, shares: as in `Movement.state` and `Movement.shares`.
        lag: updates since the values with which the step started. For values that steps set, steps with the same start
            count as one, as their mean.
    """
    if block.dtype.kind not in "fcV":
        return np.where(shares == ADDED, block + values, np.where(shares > 0, values, block))
    wide = np.promote_types(np.float32, block.dtype) if block.dtype.kind != "V" else np.dtype(np.float32)
    share = np.where(shares < 1, shares, 1.0 / (1 + lag))
    with np.errstate(invalid="ignore"):  # of infinities that stay
        mixed = (block.astype(wide) * (1 - share) + values.astype(wide) * share).astype(block.dtype)
    moved: Array = np.where((shares > 0) & (share < 1), mixed, np.where(shares > 0, values, block))
    return np.where(shares == ADDED, block + values, moved) if (shares == ADDED).any() else moved


def kept(blocks: Mapping[str, Array]) -> dict[str, Array]:
    """Blocks that can be kept: state, which rarely changes, would otherwise keep the memory of the whole answer."""
    return {name: aligned_copy(block) if kind_of(name) == STATE else block for name, block in blocks.items()}


def pieces_of(
    blocks: Sequence[Mapping[str, Any]], specs: Sequence[VariableSpec], parts: Sequence[Sequence[Slice]]
) -> dict[int, list[Any]]:
    """By variable, its flat pieces in all servers' blocks, in order. The blocks may be arrays of any framework."""
    found: dict[int, list[tuple[int, Any]]] = {}
    for server, slices in zip(blocks, parts, strict=True):
        for kind, trainable in ((WEIGHTS, True), (STATE, False)):
            flat = of_kind(kind, server)
            for part, dtype, offset in layout(specs, slices, trainable):
                piece = flat[dtype][offset : offset + part.elements]
                found.setdefault(part.variable, []).append((part.start, piece))
    return {index: [piece for _, piece in sorted(pieces, key=lambda each: each[0])] for index, pieces in found.items()}


def pack_weights(weights: Sequence[Array], specs: Sequence[VariableSpec], slices: Sequence[Slice]) -> dict[str, Array]:
    """One server's part of `weights`, in wire format."""
    return named(WEIGHTS, pack(weights, specs, slices, True)) | named(STATE, pack(weights, specs, slices, False))


def unpack_weights(blocks: Blocks, specs: Sequence[VariableSpec], parts: Sequence[Sequence[Slice]]) -> list[Array]:
    """The whole weights from all servers' blocks, in the order of `specs`; without the rows of embedding tables."""
    weights = [np.empty((0, *spec.shape[1:]) if spec.table else spec.shape, dtype_of(spec.dtype)) for spec in specs]
    for server, slices in zip(blocks, parts, strict=True):
        unpack(of_kind(WEIGHTS, server), specs, slices, True, weights)
        unpack(of_kind(STATE, server), specs, slices, False, weights)
    return weights
