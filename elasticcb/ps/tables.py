"""All embedding tables of one parameter server: each holds the rows whose ids are its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from elasticcb.buckets import BucketMap
from elasticcb.eager_tensors import array_of
from elasticcb.errors import WireError
from elasticcb.layers.initial_values import InitialValues
from elasticcb.ps.embedding_table import EmbeddingTable, HeldTable, TableSnapshot
from elasticcb.ps.optimizer_set import OptimizerSet
from elasticcb.ps.partition import VariableSpec
from elasticcb.ps.push import Rows, check_row_ids
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.table_update import TableUpdate, TableUpdates
from elasticcb.quick_call import quick_call
from elasticcb.table_spec import TableSpec
from elasticcb.table_state import TableState
from elasticcb.tensors import Array, dtype_of


class Tables:
    """The tables among the variables `specs`.

    Args:
        specs: all variables of the model.
        index: of this server.
        buckets: which rows it holds.
        optimizers: of the model; None where nothing is trained.
        limits: of memory and age.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        index: int,
        buckets: BucketMap,
        optimizers: OptimizerSet | None,
        limits: TableLimits,
    ) -> None:
        self._specs = specs
        self._index, self._buckets = index, buckets
        self._tables: dict[int, EmbeddingTable] = {}
        self._updates: dict[int, TableUpdate] = {}
        self._update_all = TableUpdates(self._updates)
        if optimizers is not None:
            self.train_by(optimizers)
        for number, spec in enumerate(specs):
            if spec.table:
                self._tables[number] = self._make(number, limits)

    def train_by(self, optimizers: OptimizerSet) -> None:
        """Updates by these optimizers from now on, which have the slots of those before."""
        self._updates = {
            number: TableUpdate(optimizers.of(number), number, spec)
            for number, spec in enumerate(self._specs)
            if spec.table and spec.trainable
        }
        self._update_all = TableUpdates(self._updates)

    def _make(self, number: int, limits: TableLimits) -> EmbeddingTable:
        spec = self._specs[number]
        table = TableSpec.from_json(spec.table)
        values = None
        if table.initializer:
            try:
                initializer = keras.saving.deserialize_keras_object(json.loads(table.initializer))
                initial = InitialValues(initializer, table.seed, table.input_dim, spec.row_elements, spec.dtype)
            except Exception as error:
                raise WireError(
                    f"The initializer of the embedding table {spec.path!r} can't be made on a server: {error} "
                    "Register its class with keras.saving.register_keras_serializable."
                ) from error
            values = _compiled(initial)
        update = self._updates.get(number)
        slots = {} if update is None else update.slots
        return EmbeddingTable(
            spec.row_elements, dtype_of(spec.dtype), values, slots, limits, f"the embedding table {spec.path!r}"
        )

    def __getitem__(self, number: int) -> EmbeddingTable:
        """Raises `WireError` for a variable that is no table."""
        if number not in self._tables:
            known = sorted(self._tables) or "none"
            raise WireError(f"A message names the embedding table {number}; tables are {known}.")
        return self._tables[number]

    @property
    def numbers(self) -> list[int]:
        """The tables' indices among the variables."""
        return sorted(self._tables)

    def check_ids(self, number: int, ids: Array) -> None:
        """Raises `WireError` unless `ids` are unique, of this server, and may be in the table."""
        spec = self._specs[number]
        check_row_ids(ids, spec.shape[0] or None, spec.path)
        if self._buckets.servers > 1 and not self._buckets.owns(self._index, ids).all():
            raise WireError(
                f"Ids of {spec.path!r} came to server {self._index} of {self._buckets.servers} that are another's."
            )

    def lookup(
        self, number: int, ids: Array, create: bool, snapshot: Mapping[int, TableSnapshot] | None = None
    ) -> Array:
        """The rows [n, dim] of `ids` (int64 [n], unique), of a snapshot or at present.

        Args:
            create: ids without a row get one; never in a snapshot.
        """
        table = self[number]
        self.check_ids(number, ids)
        return table.lookup(ids, create) if snapshot is None else snapshot[number].lookup(ids)

    def update(self, rows: Mapping[int, Rows], version: int) -> None:
        """Updates rows by the gradients of a checked push."""
        self._update_all(self._tables, rows, version)
        for number in self._tables.keys() - rows.keys():
            self._tables[number].advance(version)

    def snapshot(self) -> dict[int, TableSnapshot]:
        return {number: table.snapshot() for number, table in self._tables.items()}

    def export(self, since: int | None = None) -> dict[int, TableState]:
        """All rows, or those that were trained after version `since`."""
        return {number: table.export(since) for number, table in self._tables.items()}

    def hold(self, lock: AbstractContextManager[Any], since: int | None = None) -> dict[int, HeldTable]:
        """What `export` gives, as `EmbeddingTable.hold` does."""
        return {number: table.hold(lock, since) for number, table in self._tables.items()}

    def load(self, states: Mapping[int, TableState], version: int) -> None:
        """Replaces the rows of the tables that `states` holds by the part of it that is this server's.

        Args:
            version: of the model.
        """
        for number, state in states.items():
            table, dim = self[number], self._specs[number].row_elements
            if state.rows.shape != (len(state.ids), dim):
                raise WireError(
                    f"Rows of {self._specs[number].path!r}: [{len(state.ids)}, {dim}] was expected, "
                    f"{list(state.rows.shape)} was given."
                )
            own = state.part(self._index, self._buckets)
            if number not in self._updates:  # nothing is trained here
                own = replace(own, slots={})
            self.check_ids(number, own.ids)
            table.load(own, version)


def _compiled(initial_values: InitialValues) -> Callable[[Array], Array]:
    make = quick_call(lambda ids: [initial_values(ids)], [tf.TensorSpec([None], tf.int64)])
    return lambda ids: array_of(make([tf.constant(ids)])[0])
