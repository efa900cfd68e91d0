"""All embedding tables of one parameter server: each holds the rows of this server's ids."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.errors import ElasticCBError, WireError
from elasticcb.process.stats import TableSize
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.table_snapshot import HeldTable, TableSnapshot
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.partition import ShardMap, VariableSpec
from elasticcb.sharding.push import Rows
from elasticcb.sharding.table_state import TableSource, TableSpec, TableState

if TYPE_CHECKING:
    import tensorflow as tf

    from elasticcb.layers.initial_values import InitialValues, RowKind
    from elasticcb.ps.table_update import MakeOptimizers, TableUpdate, TableUpdates


class Tables:
    """The tables among the variables `specs`.

    Only where there are some does a server import TensorFlow, for the rows that they create and the optimizers.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        index: int,
        shard_map: ShardMap,
        make_optimizers: MakeOptimizers | None,
        limits: TableLimits,
    ) -> None:
        self._specs = specs
        self._described = {number: TableSpec.from_json(spec.table) for number, spec in enumerate(specs) if spec.table}
        self._index, self._shard_map = index, shard_map
        self._tables: dict[int, EmbeddingTable] = {}
        self._initial: dict[int, InitialValues] = {}  # of tables that create rows
        self._draws: dict[RowKind, Callable[[list[tf.Tensor]], tf.Tensor]] = {}
        self._updates: dict[int, TableUpdate] = {}
        self._update_all: TableUpdates | None = None
        if make_optimizers is not None and self._described:
            self._train_by(make_optimizers)
        for number in self._described:
            self._tables[number] = self._make(number, limits)
        self._tick()

    def _tick(self) -> None:
        """Updates growth statistics of the tables."""
        now = time.monotonic()
        for table in self._tables.values():
            table.flow.tick(now)

    def _train_by(self, make_optimizers: MakeOptimizers) -> None:
        from elasticcb.optimizers.traits import may_join, may_join_rows
        from elasticcb.ps.table_update import TableUpdate, TableUpdates, fresh_leaves

        known = fresh_leaves(make_optimizers, self._specs)
        shared: dict[Any, TableUpdate] = {}
        for number, table in self._described.items():
            spec = self._specs[number]
            if spec.trainable:
                place = next(place for place, leaf in enumerate(known) if number in leaf.variables)
                optimizer, multiplier = known[place].optimizer, table.options.learning_rate_multiplier or 1.0
                kind: Any = (place, spec.dtype, spec.no_weight_decay, multiplier)
                if not may_join(optimizer):
                    kind = (*kind, spec.row_elements) if may_join_rows(optimizer) else number
                if kind not in shared:
                    leaf = fresh_leaves(make_optimizers, self._specs)[place]
                    shared[kind] = TableUpdate(leaf, spec, multiplier)
                self._updates[number] = shared[kind]
        self._update_all = TableUpdates(self._updates)

    def _make(self, number: int, limits: TableLimits) -> EmbeddingTable:
        spec, table = self._specs[number], self._described[number]
        values = None
        if table.initializer:
            import keras

            from elasticcb.layers.initial_values import InitialValues

            try:
                initializer = keras.saving.deserialize_keras_object(json.loads(table.initializer))
                self._initial[number] = InitialValues(
                    initializer, table.seed, table.input_dim, spec.row_elements, spec.dtype
                )
            except Exception as error:
                raise WireError(
                    f"The initializer of the embedding table {spec.path!r} can't be created on a parameter server: "
                    f"{error} Register its class with keras.saving.register_keras_serializable."
                ) from error
            values = partial(self._initial_rows_of, number)
        update = self._updates.get(number)
        slots = {} if update is None else update.slots_of(spec.row_elements)
        return EmbeddingTable(
            spec.row_elements,
            dtype_of(spec.dtype),
            values,
            slots,
            limits,
            f"the embedding table {spec.path!r}",
            replace(table.options, max_rows=self._share(table.options.max_rows or 0)),
            time.time,
        )

    def _share(self, rows: int) -> int:
        """This server's share of `rows`; at least 1, unless `rows` is 0."""
        servers = self._shard_map.servers
        share = rows * (self._index + 1) // servers - rows * self._index // servers
        return max(share, min(rows, 1))

    def __getitem__(self, number: int) -> EmbeddingTable:
        """Raises `WireError` for a variable that is not a table."""
        if number not in self._tables:
            known = sorted(self._tables) or "none"
            raise WireError(f"A message has embedding table {number}; the tables are {known}.")
        return self._tables[number]

    @property
    def numbers(self) -> list[int]:
        """The tables' indices among the variables."""
        return sorted(self._tables)

    def sizes(self) -> dict[str, TableSize]:
        """Sizes by variable path. Callable from any thread."""
        return {self._specs[number].path: TableSize(len(each), each.bytes) for number, each in self._tables.items()}

    def check_ids(self, number: int, ids: Array) -> None:
        """Raises `WireError` unless `ids` are unique, belong to this server, and are valid for the table."""
        if self[number].knows(ids):
            return
        spec = self._specs[number]
        _check_row_ids(ids, spec.shape[0] or None, spec.path)
        if self._shard_map.servers > 1 and not self._shard_map.owns(self._index, ids).all():
            raise WireError(
                f"Server {self._index} of {self._shard_map.servers} got ids of {spec.path!r} of other servers."
            )

    def lookup(
        self, wanted: Mapping[int, Array], create: bool, snapshot: Mapping[int, TableSnapshot] | None = None
    ) -> dict[int, Array]:
        """By table, the rows [n, dim] of ids (int64 [n], unique), of a snapshot or current.

        Args:
            create: create missing rows; never in a snapshot.
        """
        tables = {number: self[number] for number in wanted}
        for number, ids in wanted.items():
            self.check_ids(number, ids)
        if snapshot is not None:
            return {number: snapshot[number].lookup(ids) for number, ids in wanted.items()}
        found = {number: tables[number].find(ids, create) for number, ids in wanted.items()}
        missing = {number: wanted[number][found[number].missing] for number in found if number in self._initial}
        initial = self._initial_rows({number: ids for number, ids in missing.items() if len(ids)})
        return {
            number: tables[number].lookup(ids, create, found[number], initial.get(number))
            for number, ids in wanted.items()
        }

    def _initial_rows(self, wanted: Mapping[int, Array]) -> dict[int, Array]:
        """By table, the initial rows [n, dim] of ids; tables of one kind are processed together."""
        if not wanted:
            return {}
        import tensorflow as tf

        from elasticcb.layers.initial_values import initial_rows
        from elasticcb.tf.batch_signatures import quick_call
        from elasticcb.tf.tensors import array_of

        signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.uint64)]
        kinds: dict[RowKind, list[int]] = {}
        for number in wanted:
            kinds.setdefault(self._initial[number].kind, []).append(number)
        made: dict[int, Array] = {}
        for kind, numbers in kinds.items():
            lengths = [len(wanted[number]) for number in numbers]
            starts = np.repeat(np.array([self._initial[number].start for number in numbers], np.uint64), lengths)
            ids = np.concatenate([wanted[number] for number in numbers])
            with tf.device("/CPU:0"):
                if kind not in self._draws:
                    self._draws[kind] = quick_call(partial(initial_rows, kind), signature)
                rows = array_of(self._draws[kind]([tf.constant(ids), tf.constant(starts)]))
            made |= dict(zip(numbers, np.split(rows, np.cumsum(lengths)[:-1]), strict=True))
        return made

    def _initial_rows_of(self, number: int, ids: Array) -> Array:
        return self._initial_rows({number: ids})[number]

    def update(
        self, rows: Mapping[int, Rows], version: int, shared: Mapping[str, Array] = MappingProxyType({})
    ) -> None:
        """Updates rows by the gradients of a checked push; `shared` as in `TableUpdates`."""
        if rows:
            if self._update_all is None:
                raise ElasticCBError("This parameter server does not train, so it accepts no gradients of rows.")
            self._update_all(self._tables, rows, version, shared)
        self.advance(version)
        self._tick()

    def advance(self, version: int) -> None:
        """Sets the current version of the model for all tables."""
        for table in self._tables.values():
            table.advance(version)

    def snapshot(self) -> dict[int, TableSnapshot]:
        return {number: table.snapshot() for number, table in self._tables.items()}

    def export(self, since: int | None = None) -> dict[int, TableState]:
        """All rows, or those trained after version `since`."""
        return {number: table.export(since) for number, table in self._tables.items()}

    def hold(self, lock: AbstractContextManager[Any], since: int | None = None) -> dict[int, HeldTable]:
        """Like `export`, as with `EmbeddingTable.hold`."""
        return {number: table.hold(lock, since) for number, table in self._tables.items()}

    @property
    def removed(self) -> int:
        """How many rows have been removed, of all tables."""
        return sum(table.flow.removed for table in self._tables.values())

    def keep_gone(self, since: int) -> None:
        """Remembers which rows are removed, for `gone`."""
        for table in self._tables.values():
            table.keep_gone(since)

    def gone(self, since: int) -> dict[int, Array]:
        """Ids of rows that were removed from version `since` on, by table; as of `EmbeddingTable.gone`."""
        return {number: table.gone(since) for number, table in self._tables.items()}

    def load(self, sources: Mapping[int, TableSource], version: int) -> None:
        """Replaces the rows of the tables in `sources` by this server's part of these."""
        for number, source in sources.items():
            self[number].load(_OwnRows(self, number, source), version)

    def ages(self) -> dict[int, Array]:
        """When the model had which version, for tables whose rows age by time: int64 [n, 2]."""
        exported = {number: table.export_ages() for number, table in self._tables.items()}
        return {number: ages for number, ages in exported.items() if ages is not None}

    def restore_ages(self, ages: Mapping[int, Array], version: int, stood_still: bool = False) -> None:
        """Restores the result of `ages` at this version of the model; `stood_still` as in `RowAges.restore`."""
        for number, marks in ages.items():
            self[number].ages.restore(marks, version, stood_still)

    def owns(self, ids: Array) -> Array:
        """Which of `ids` (int64 [n]) are this server's: bool [n]."""
        return self._shard_map.owns(self._index, ids)

    def own_part(self, number: int, state: TableState) -> TableState:
        """This server's part of given rows. Raises `WireError` when they don't fit the table."""
        dim = self._specs[number].row_elements
        if state.rows.shape != (len(state.ids), dim):
            raise WireError(
                f"Rows of {self._specs[number].path!r}: expected [{len(state.ids)}, {dim}], got "
                f"{list(state.rows.shape)}."
            )
        own = state.part(self._index, self._shard_map)
        if number not in self._updates:  # nothing is trained here
            own = replace(own, slots={})
        self.check_ids(number, own.ids)
        return own


class _OwnRows:
    """A `TableSource` restricted to this server's rows."""

    def __init__(self, tables: Tables, number: int, source: TableSource) -> None:
        self._tables, self._number, self._source = tables, number, source

    def __len__(self) -> int:
        return sum(len(ids) for ids, _ in self.ages())

    def ages(self) -> Iterator[tuple[Array, Array | None]]:
        for ids, used in self._source.ages():
            own = self._tables.owns(ids)
            yield ids[own], None if used is None else used[own]

    def pieces(self) -> Iterator[TableState]:
        for piece in self._source.pieces():
            yield self._tables.own_part(self._number, piece)


def _check_row_ids(ids: Array, below: int | None, path: str) -> None:
    """Raises `WireError`, naming the variable, unless `ids` are int64 [n], unique, and from 0 up to (excluding)
    `below`."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise WireError(f"Row ids of {path!r}: expected int64[n], got {ids.dtype.name}{list(ids.shape)}.")
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
