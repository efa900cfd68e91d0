"""Updates rows of embedding tables with the user's own optimizer.

A clone of the optimizer runs on a small variable that holds just the rows of one push ("lazy" updates: what would
change a row without a gradient, as momentum and weight decay do, waits until it has one). The clone takes the number of
steps and the learning rate of the optimizer that it stands for, so that Adam's correction of its averages counts the
steps of the model, not those of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.optimizers.traits import may_join, may_update_rows
from elasticcb.ps.embedding_table import EmbeddingTable, RowChange
from elasticcb.ps.optimizer import ServerOptimizer
from elasticcb.ps.row_update import RowClone
from elasticcb.rpc.tensors import Array, aligned
from elasticcb.sharding.partition import VariableSpec
from elasticcb.tf.concrete_call import quick_call
from elasticcb.tf.convert import array_of, tensor_of


class TableUpdate:
    """The optimizer of one table, or of several that differ in nothing that it looks at.

    To be called before the dense variables of the same push are updated, which advances the optimizer.

    Args:
        optimizer: that the table is trained by. Its variables need not include the table.
        index: of the table in the model.
        spec: of the table.
        rate_multiplier: of the table, by which the optimizer's learning rate is multiplied.

    Attributes:
        kind: the optimizer's class name.
        slots: what each slot begins with, by name: of the rows, or elements, that are updated.
        is_joined: rows of any width are updated, as elements [1].
        row_shape: of what is updated.
        signature: of what `run` takes.

    Raises `ModelFileError` for an optimizer that needs more than single rows.
    """

    def __init__(
        self, optimizer: ServerOptimizer, index: int, spec: VariableSpec, rate_multiplier: float = 1.0
    ) -> None:
        self.is_joined = may_join(optimizer.optimizer)
        self.row_shape: tuple[int, ...] = (1,) if self.is_joined else tuple(spec.shape[1:])
        self.kind = optimizer.kind
        if not may_update_rows(optimizer.optimizer):
            raise _not_by_rows(self.kind, spec)
        self._clone = RowClone(optimizer, index, (0, *self.row_shape), spec.dtype, spec.path, rate_multiplier)
        if self._clone.has_extras:
            raise _not_by_rows(self.kind, spec)
        self.slots = self._clone.slots
        rows = [self.row_shape] * 2 + [row.shape for row in self.slots.values()]
        self.signature = [tf.TensorSpec([None, *shape], spec.dtype) for shape in rows]

    def slots_of(self, dim: int) -> dict[str, Array]:
        """What each slot begins with in a table of rows [dim], by name."""
        return {name: np.broadcast_to(row, dim) for name, row in self.slots.items()} if self.is_joined else self.slots

    def run(self, gradients: tf.Tensor, rows: tf.Tensor, *slots: tf.Tensor) -> list[tf.Tensor]:
        """New rows and slots, inside a compiled function: [n, …] each, slots in the order of `self.slots`."""
        self._clone.copy_shared()
        return self._clone.apply(gradients, rows, *slots)


class TableUpdates:
    """The optimizers of all tables of a server; one push is one call of a compiled function, whichever tables it names.

    Args:
        updates: by table; rows of those that have the same one are updated as if they were of one table.
    """

    def __init__(self, updates: Mapping[int, TableUpdate]) -> None:
        self._updates = updates
        self._compiled: dict[tuple[TableUpdate, ...], _Compiled] = {}

    def __call__(
        self, tables: Mapping[int, EmbeddingTable], rows: Mapping[int, tuple[Array, Array]], version: int
    ) -> None:
        """Updates rows of `tables` by gradients.

        Args:
            rows: by table, (ids int64 [n], gradients [n, dim]).
            version: of the model after this update.

        Raises what `EmbeddingTable.prepare` and `TableUpdate` raise; no row has changed then.
        """
        changes = {index: tables[index].prepare(*given) for index, given in rows.items()}
        changes = {index: change for index, change in changes.items() if len(change.ids)}
        groups: dict[TableUpdate, list[int]] = {}
        for index in changes:
            groups.setdefault(self._updates[index], []).append(index)
        key = tuple(groups)
        if key and key not in self._compiled:
            self._compiled[key] = _Compiled(key)
        given = [_arrays(update, [changes[index] for index in group]) for update, group in groups.items()]
        results = self._compiled[key](given) if key else []
        for group, (update, arrays) in zip(groups.values(), zip(key, results, strict=True), strict=True):
            first = 0
            for index in group:
                change = changes[index]
                end = first + change.rows.size // math.prod(update.row_shape)
                new, *updated = (array[first:end] for array in arrays)
                slots = {
                    name: slot.reshape(change.slots[name].shape)
                    for name, slot in zip(update.slots, updated, strict=True)
                }
                tables[index].commit(change, new.reshape(change.rows.shape), slots, version)
                first = end
        for index in rows.keys() - changes.keys():
            tables[index].advance(version)


def _arrays(update: TableUpdate, changes: Sequence[RowChange]) -> list[Array]:
    """What `update` takes of the rows of several tables, one after another."""
    parts = [[change.gradients, change.rows, *(change.slots[name] for name in update.slots)] for change in changes]
    shapes = [spec.shape[1:] for spec in update.signature]
    return [
        _joined([part.reshape(-1, *shape) for part in each])
        for each, shape in zip(zip(*parts, strict=True), shapes, strict=True)
    ]


def _joined(arrays: Sequence[Array]) -> Array:
    if len(arrays) == 1:
        return arrays[0]
    whole = aligned((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=whole)


class _Compiled:
    """Several updates as one compiled function."""

    def __init__(self, updates: Sequence[TableUpdate]) -> None:
        self._updates = updates
        self._call: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]] | None = None

    def __call__(self, given: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """Of each update, from (gradients, rows, *slots) to (rows, *slots)."""
        tensors = [tensor_of(array) for arrays in given for array in arrays]
        try:
            if self._call is None:
                self._call = quick_call(self._run, [spec for update in self._updates for spec in update.signature])
            results = iter([array_of(tensor) for tensor in self._call(tensors)])
        except Exception as error:
            kinds = ", ".join(dict.fromkeys(update.kind for update in self._updates))
            raise ModelFileError(
                f"The optimizer {kinds} failed on rows of an embedding table: {describe(error)}", user_traceback(error)
            ) from error
        return [[next(results) for _ in range(1 + len(update.slots))] for update in self._updates]

    def _run(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        given = iter(tensors)
        return [
            result
            for update in self._updates
            for result in update.run(*(next(given) for _ in range(2 + len(update.slots))))
        ]


def _not_by_rows(kind: str, spec: VariableSpec) -> ModelFileError:
    return ModelFileError(
        f"The optimizer {kind} can't train the embedding table {spec.path!r}, of which each step updates a few rows: "
        "an optimizer that averages weights (use_ema), accumulates gradients, or treats neither each element nor each "
        "row on its own needs all rows. Use another one (SGD, Adagrad, Adam, Ftrl, RowWiseAdagrad, ...). A class of "
        "your own says what its updates depend on by a class attribute: `elementwise = True` if that of an element "
        "depends on nothing but the element, its gradient and its slots; `rowwise = True` if that of a row does, and "
        "all that it keeps for a variable has its rows, [rows, ...]."
    )
