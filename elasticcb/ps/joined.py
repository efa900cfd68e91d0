"""Variables that an optimizer updates as one.

An update of 300 small variables takes 30 times as long as one of a single variable of their size, and a minute to
compile. Where an optimizer treats each element on its own, it need not know where one variable ends and the next
begins. So those that are always updated together are held as one flat variable, with one flat variable for each slot.
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

# Of one flat variable, 4 MiB of float32. A larger variable gains nothing by being joined, and what an update makes anew
# should be small in comparison with the model.
MOST_ELEMENTS = 1 << 20


class Piece:
    """A variable of the model, or one of its slots, that is a part of a flat variable.

    Args:
        whole: the flat variable.
        offset: of the first element in it.
        shape: of the part.
        path: of the model's variable.
    """

    def __init__(self, whole: keras.Variable, offset: int, shape: Sequence[int], path: str) -> None:
        self.whole, self.offset, self.shape, self.path = whole, offset, tuple(shape), path
        self.dtype: str = whole.dtype
        self.end = offset + math.prod(self.shape)

    def numpy(self) -> Array:
        """The present values, read-only, in an array that is never written again."""
        return array_of(tf.convert_to_tensor(self.whole.value))[self.offset : self.end].reshape(self.shape)

    def of(self, slot: keras.Variable) -> Piece:
        """The same part of another flat variable."""
        return Piece(slot, self.offset, self.shape, self.path)


def join(variables: Mapping[int, keras.Variable], group: Sequence[int], name: str) -> dict[int, Piece]:
    """Makes one flat variable of `group`, indices of `variables`, which have one dtype; returns their parts of it."""
    values = np.concatenate([variables[index].numpy().reshape(-1) for index in group])
    whole = keras.Variable(values, dtype=variables[group[0]].dtype, trainable=True, name=name)
    pieces: dict[int, Piece] = {}
    offset = 0
    for index in group:
        pieces[index] = Piece(whole, offset, variables[index].shape, variables[index].path)
        offset = pieces[index].end
    return pieces


def groups_of(kinds: Mapping[int, Any], sizes: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Which variables to join: those of one kind, in order, up to `MOST_ELEMENTS`. None is alone in a group.

    Args:
        kinds: by variable, what those that are joined have in common.
        sizes: by variable, its elements.
    """
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
    """The groups without what an update by dense gradients, and by gradients of rows, takes out of them.

    Those that are left are updated as a whole by each update so far, or not at all, in whichever order these came. So a
    server that takes another's place comes to the same groups; until each kind of update has come once, some of a
    model whose steps update different variables may be larger there, and the last bit of an update be another.
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
    """Adds a run, as a part of the last one where it goes on there."""
    if runs and runs[-1].end == run.start and runs[-1].tensor is run.tensor:
        runs[-1] = runs[-1]._replace(end=run.end)
    else:
        runs.append(run)


def concatenated(runs: Sequence[Run]) -> tf.Tensor:
    """The elements of all, flat. Nothing is copied where there is one, of all elements of a tensor."""
    flats = [tf.reshape(run.tensor, [-1]) for run in runs]
    parts = [
        flat if flat.shape.num_elements() == run.end - run.start else flat[run.start : run.end]
        for flat, run in zip(flats, runs, strict=True)
    ]
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def assign(targets: Iterable[tuple[keras.Variable | Piece, Array]]) -> None:
    """Sets variables, and parts of flat ones, each of these at once."""
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
