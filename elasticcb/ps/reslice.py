"""Cuts and reassembles servers' parts of variables for another number of servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elasticcb.checkpoint.shard_file import Part
from elasticcb.errors import ElasticCBError
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.partition import Slice, VariableSpec


class PartSlices(NamedTuple):
    """A part of the model, and the slices of its arrays."""

    slices: Sequence[Slice]
    part: Part


def overlap(held: Sequence[Slice], wanted: Sequence[Slice]) -> list[Slice]:
    """The intersection; each has at most one slice of a variable."""
    own = {part.variable: part for part in held}
    found = []
    for part in wanted:
        other = own.get(part.variable)
        if other is not None:
            start, stop = max(part.start, other.start), min(part.stop, other.stop)
            if start < stop:
                found.append(Slice(part.variable, start, stop))
    return found


def cut(held: PartSlices, wanted: Sequence[Slice], specs: Sequence[VariableSpec]) -> PartSlices:
    """The parts of `held` within the slices `wanted`, without tables and shared variables."""
    slices = overlap(held.slices, wanted)
    own = {part.variable: part for part in held.slices}
    result = Part(version=held.part.version)
    for part in slices:
        spec, whole = specs[part.variable], own[part.variable]
        result.weights[part.variable] = part.of(held.part.weights[part.variable], spec, whole)
        for (variable, name), slot in held.part.slots.items():
            if variable == part.variable:
                result.slots[variable, name] = part.of(slot, spec, whole)
    # Such variables are never split.
    result.extras = {key: value for key, value in held.part.extras.items() if key[0] in result.weights}
    return PartSlices(slices, result)


def put_together(pieces: Sequence[PartSlices], wanted: Sequence[Slice], specs: Sequence[VariableSpec]) -> Part:
    """Assembles the part of a server with the slices `wanted` from `pieces`, without tables; shared variables come from
    the first piece that has any.

    Raises `ElasticCBError` when weights are missing.
    """
    result = Part(version=max((piece.part.version for piece in pieces), default=0))
    for part in wanted:
        spec, filled = specs[part.variable], 0
        arrays: dict[str, Array] = {}
        found: dict[str, int] = {}  # elements
        for piece in pieces:
            for held in piece.slices:
                if held.variable != part.variable:
                    continue
                common = Slice(part.variable, max(held.start, part.start), min(held.stop, part.stop))
                if common.elements < 0:
                    continue
                given = {"": piece.part.weights[held.variable]}
                given |= {name: slot for (index, name), slot in piece.part.slots.items() if index == held.variable}
                for name, array in given.items():
                    if name not in arrays:
                        arrays[name] = np.empty((*part.shape(spec)[:1], *array.shape[1:]), array.dtype)
                    common.of(arrays[name], spec, part)[...] = common.of(array, spec, held)
                    found[name] = found.get(name, 0) + common.elements
                filled += common.elements
                extras = {key: value for key, value in piece.part.extras.items() if key[0] == held.variable}
                result.extras |= extras
        if filled != part.elements:
            raise ElasticCBError(f"{part.elements - filled} elements of {spec.path!r} are missing.")
        empty = np.empty(part.shape(spec), dtype_of(spec.dtype))
        result.weights[part.variable] = arrays.pop("", empty)
        # A slot that some piece lacks is left out: workers start it afresh.
        complete = {name: slot for name, slot in arrays.items() if found[name] == part.elements}
        result.slots |= {(part.variable, name): slot for name, slot in complete.items()}
    for piece in pieces:
        if piece.part.shared and not result.shared:
            result.shared, result.optimizer = piece.part.shared, piece.part.optimizer
            result.ages = piece.part.ages
    return result
