"""Variables that an optimizer updates as one flat variable.

Updating 300 small variables takes 30 times as long as one variable of their total size, and a minute to compile. An
optimizer that treats every element independently need not know the boundaries between variables. So variables that are
always updated together are stored as one flat variable, with one flat variable per slot.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elasticcb.rpc.tensors import Array
from elasticcb.tf.convert import array_of

# Per flat variable: 4 MiB of float32. Larger variables gain nothing from joining, and temporary arrays of an update
# should stay small compared with the model.
MOST_ELEMENTS = 1 << 20


class Piece:
    """A variable of the model, or one of its slots, stored as a part of a flat variable."""

    def __init__(self, whole: keras.Variable, offset: int, shape: Sequence[int], path: str) -> None:
        self.whole, self.offset, self.shape, self.path = whole, offset, tuple(shape), path
        self.dtype: str = whole.dtype
        self.end = offset + math.prod(self.shape)

    def numpy(self) -> Array:
        """The current values, as a read-only array that never changes."""
        return array_of(tf.convert_to_tensor(self.whole.value))[self.offset : self.end].reshape(self.shape)

    def of(self, slot: keras.Variable) -> Piece:
        """The corresponding part of another flat variable."""
        return Piece(slot, self.offset, self.shape, self.path)


def join(variables: Mapping[int, keras.Variable], group: Sequence[int], name: str) -> dict[int, Piece]:
    """Creates one flat variable for `group`, indices of `variables` with one dtype; returns their parts of it."""
    values = np.concatenate([variables[index].numpy().reshape(-1) for index in group])
    whole = keras.Variable(values, dtype=variables[group[0]].dtype, trainable=True, name=name)
    pieces: dict[int, Piece] = {}
    offset = 0
    for index in group:
        pieces[index] = Piece(whole, offset, variables[index].shape, variables[index].path)
        offset = pieces[index].end
    return pieces


def groups_of(kinds: Mapping[int, Any], sizes: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Variables to join: those of one kind, in order, up to `MOST_ELEMENTS` per group. A group has at least two."""
    groups: list[list[int]] = []
    newest: dict[Any, list[int]] = {}
    for index, kind in kinds.items():
        group = newest.get(kind)
        if group is None or sum(sizes[other] for other in group) + sizes[index] > MOST_ELEMENTS:
            group = newest[kind] = []
            groups.append(group)
        group.append(index)
    return [tuple(group) for group in groups if len(group) > 1]


def parted(groups: Sequence[Sequence[int]], dense: Collection[int], rows: Collection[int]) -> list[tuple[int, ...]]:
    """Splits groups for an update: variables with dense gradients from those without; variables with gradients of rows
    (`rows`), and single ones, leave the groups.

    Each resulting group has so far been updated either as a whole or not at all, in any order of updates. So a
    replacement server arrives at the same groups. Until every kind of update has occurred once, some groups may be
    larger there for a model whose steps update different variables, and the last bit of an update may differ.
    """
    together, alone = set(dense), set(rows)
    parts = [
        tuple(index for index in group if index not in alone and (index in together) is taken)
        for group in groups
        for taken in (True, False)
    ]
    return [part for part in parts if len(part) > 1]


class Run(NamedTuple):
    """Elements [start, end) of a tensor in C order."""

    tensor: tf.Tensor
    start: int
    end: int


def add_run(runs: list[Run], run: Run) -> None:
    """Appends a run, merging it with the last one if contiguous."""
    if runs and runs[-1].end == run.start and runs[-1].tensor is run.tensor:
        runs[-1] = runs[-1]._replace(end=run.end)
    else:
        runs.append(run)


def concatenated(runs: Sequence[Run]) -> tf.Tensor:
    """All elements, flat. A single run of a whole tensor is not copied."""
    flats = [tf.reshape(run.tensor, [-1]) for run in runs]
    parts = [
        flat if flat.shape.num_elements() == run.end - run.start else flat[run.start : run.end]
        for flat, run in zip(flats, runs, strict=True)
    ]
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def assign(targets: Iterable[tuple[keras.Variable | Piece, Array]]) -> None:
    """Sets variables, and parts of flat ones; each flat variable is assigned once."""
    flats: dict[int, tuple[keras.Variable, list[tuple[Piece, Array]]]] = {}
    for target, value in targets:
        if isinstance(target, Piece):
            flats.setdefault(id(target.whole), (target.whole, []))[1].append((target, value))
        else:
            target.assign(value)
    for whole, parts in flats.values():
        values = whole.numpy()
        for piece, value in parts:
            values[piece.offset : piece.end] = value.reshape(-1)
        whole.assign(values)
