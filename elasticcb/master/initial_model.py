"""A model as it is sent to parameter servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from elasticcb.clients.ps import Ids
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.optimizers.state import OptimizerState, cut_state, to_tensors
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import AGES, named
from elasticcb.sharding.flat_blocks import pack_weights
from elasticcb.sharding.table_state import TableState
from elasticcb.sharding.table_state import to_tensors as tables_to


class InitialModel(NamedTuple):
    """Where servers get the model from: weights in the order of the specs, or the folder of a checkpoint version.

    Attributes:
        optimizer_state: initial optimizer state, with weights; missing parts start fresh.
    """

    weights: Sequence[Array] = ()
    checkpoint: str = ""
    optimizer_state: OptimizerState | None = None
    version: int = 0
    ids: Ids | None = None
    used: Mapping[int, Array] | None = None
    ages: Mapping[int, Array] = MappingProxyType({})

    def part(self, servers: ServerGroup, index: int) -> dict[str, Array]:
        """One server's part of weights and state, serialized; without weights, only the optimizer state."""
        specs, slices, state = servers.specs, servers.partition[index], self.optimizer_state or OptimizerState()
        tensors = pack_weights(self.weights, specs, slices) if self.weights else {}
        tables = {
            table: self._table(table, state).part(index, servers.shard_map)
            for table, spec in enumerate(specs)
            if spec.table and self.weights
        }
        return tensors | to_tensors(cut_state(state, specs, slices)) | tables_to(tables) | named(AGES, self.ages)

    def _table(self, table: int, state: OptimizerState) -> TableState:
        slots = {name: slot for (variable, name), slot in state.slots.items() if variable == table}
        rows = self.weights[table]
        ids = self.ids[table] if self.ids and table in self.ids else np.arange(len(rows), dtype=np.int64)
        return TableState(ids, rows, slots, used=(self.used or {}).get(table))
