"""The complete state of optimizers, independent of servers, files and Keras objects.

It is transferred between parameter servers and the Keras optimizers of a model in one process: `fit` continues from the
state that it was given, and a model that a callback saves or the caller gets back is as if trained in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import (
    AGES,
    EXTRAS,
    SHARED,
    SLOTS,
    STATE,
    TABLE,
    WEIGHTS,
    by_index_and_name,
    named,
    of_kind,
    without,
)
from elasticcb.sharding.flat_blocks import pack_weights
from elasticcb.sharding.partition import ShardMap, Slice, VariableSpec, cut_slots
from elasticcb.sharding.table_state import TableState
from elasticcb.sharding.table_state import to_tensors as tables_to

Key = tuple[int, str]  # index of the model's variable, name

LEARNING_RATE = "learning_rate"  # the shared variable of the model's first optimizer


class Optimizers(NamedTuple):
    """What servers know of a job's optimizers.

    Attributes:
        names: as `OptimizerState.optimizers`.
        periods: for step counters, by the name in `OptimizerState.shared`: after how many steps the behaviour repeats.
        learning_rate: the base rate; None if it can't be set.
    """

    names: tuple[str, ...] = ()
    periods: Mapping[str, int] = MappingProxyType({})
    learning_rate: float | None = None


@dataclass
class OptimizerState:
    """Complete variables of all optimizers, independent of the number of servers.

    Attributes:
        slots: variables with the rows of the model's variable, [rows, …]: of the same shape, unless the optimizer
            reduces rows.
        extras: variables of other shapes that belong to one variable.
        shared: variables that belong to no variable: "iterations", "learning_rate"; "1/iterations" of the model's
            second optimizer, "0.1/iterations" of the second one inside a MultiOptimizer.
        optimizers: class names, with the same prefixes; empty if unknown.
    """

    slots: dict[Key, Array] = field(default_factory=dict)
    extras: dict[Key, Array] = field(default_factory=dict)
    shared: dict[str, Array] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()

    def items(self) -> Iterator[tuple[str, Any, Array]]:
        """Of each variable the attribute with it, its key and its value."""
        for kind in ("slots", "extras", "shared"):
            for key, value in getattr(self, kind).items():
                yield kind, key, value


@dataclass
class ModelState:
    """All weights, in the order of `model.weights`, and the state of all optimizers; or where they are.

    Attributes:
        optimizer: missing parts start fresh on servers that get it.
        ids: for embedding tables, by variable: the ids (int64 [n], ascending) of the rows of the weights [n, dim] and
            the slots. Default: 0, 1, ….
        used: for embedding tables, by variable: the version at which each of these rows was last trained, int64 [n];
            unknown for missing variables.
        ages: likewise when the model had which version, as `RowAges.export`, for rows that age by time.
        checkpoint: the folder of a checkpoint version that has all this; "": it is here.
    """

    weights: list[Array] = field(default_factory=list)
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    version: int = 0
    ids: dict[int, Array] = field(default_factory=dict)
    used: dict[int, Array] = field(default_factory=dict)
    ages: dict[int, Array] = field(default_factory=dict)
    checkpoint: str = ""

    def part(
        self, specs: Sequence[VariableSpec], slices: Sequence[Slice], shard_map: ShardMap, index: int
    ) -> dict[str, Array]:
        """One server's part of weights and state, serialized; without weights, only the optimizer state."""
        tensors = pack_weights(self.weights, specs, slices) if self.weights else {}
        tables = {
            table: self._table(table).part(index, shard_map)
            for table, spec in enumerate(specs)
            if spec.table and self.weights
        }
        state = to_tensors(cut_state(self.optimizer, specs, slices))
        return tensors | state | tables_to(tables) | named(AGES, self.ages)

    def _table(self, table: int) -> TableState:
        slots = {name: slot for (variable, name), slot in self.optimizer.slots.items() if variable == table}
        rows = self.weights[table]
        ids = self.ids[table] if table in self.ids else np.arange(len(rows), dtype=np.int64)
        return TableState(ids, rows, slots, used=self.used.get(table))


def to_tensors(state: OptimizerState) -> dict[str, Array]:
    """Names on the wire: "slots/I/NAME", "extras/I/NAME", "shared/NAME"."""
    return named(SLOTS, state.slots) | named(EXTRAS, state.extras) | named(SHARED, state.shared)


def from_tensors(tensors: Mapping[str, Array], optimizers: Iterable[str] = ()) -> OptimizerState:
    """The inverse of `to_tensors`. Ignores tensors of weights and tables; raises `WireError` for others."""
    unknown = without(tensors, WEIGHTS, STATE, TABLE, AGES, SLOTS, EXTRAS, SHARED)
    if unknown:
        raise WireError(
            f"A state contains a tensor named {next(iter(unknown))!r}. Expected weights/DTYPE, state/DTYPE, "
            "slots/INDEX/NAME, extras/INDEX/NAME and shared/NAME."
        )
    slots, extras = (by_index_and_name(kind, tensors) for kind in (SLOTS, EXTRAS))
    return OptimizerState(slots, extras, of_kind(SHARED, tensors), tuple(optimizers))


def cut_state(state: OptimizerState, specs: Sequence[VariableSpec], slices: Sequence[Slice]) -> OptimizerState:
    """The part of a complete state for the server with `slices`, without untrained variables.

    Raises `WireError` if a slot has other rows than its variable.
    """
    held = {part.variable for part in slices if specs[part.variable].trainable}
    slots = cut_slots(state.slots, specs, slices)
    extras = {key: value for key, value in state.extras.items() if key[0] in held}
    return OptimizerState(slots, extras, dict(state.shared), state.optimizers)


def join_states(
    states: Sequence[OptimizerState], specs: Sequence[VariableSpec], parts: Sequence[Sequence[Slice]]
) -> OptimizerState:
    """Joins the parts of all servers; shared variables and duplicate extras come from the first server.

    A slot that some server lacks, because no movement has reached it yet, is left out.
    """
    whole = OptimizerState(optimizers=states[0].optimizers)
    missing: dict[Key, int] = {}  # elements of a slot's variable
    for state, slices in zip(states, parts, strict=True):
        held = {part.variable: part for part in slices}
        for (index, name), value in state.slots.items():
            spec = specs[index]
            if (index, name) not in whole.slots:
                whole.slots[index, name] = np.empty((*spec.shape[:1], *value.shape[1:]), value.dtype)
            held[index].of(whole.slots[index, name], spec)[...] = value
            missing[index, name] = missing.get((index, name), spec.elements) - held[index].elements
        whole.extras = {**state.extras, **whole.extras}
        whole.shared = {**state.shared, **whole.shared}
    whole.slots = {key: slot for key, slot in whole.slots.items() if not missing[key]}
    return whole
