"""Models, optimizers and movements that the parameter servers' tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from ps_clients import TrainingControl

from elasticcb.checkpoint import shard_file
from elasticcb.checkpoint.shard_file import write_part
from elasticcb.checkpoint.versions import begin_version, finish_version, server_file
from elasticcb.optimizers.state import Optimizers, OptimizerState, cut_state, from_tensors, to_tensors
from elasticcb.optimizers.variables import described
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.parameters import Parameters
from elasticcb.ps.server import PSServer
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame, dtype_of
from elasticcb.settings import ClusterSettings, Command, JobSettings, ModelSettings, TrainingSettings
from elasticcb.sharding.array_names import AGES, EXTRAS, SHARED, SLOTS, TABLE, WEIGHT, by_index, kind_of, only
from elasticcb.sharding.partition import ShardMap, VariableSpec, pack, partition, unpack
from elasticcb.sharding.push import Push

SPECS = (
    VariableSpec("embedding/embeddings", (12, 4), "float32", True),
    VariableSpec("dense/kernel", (4, 6), "float32", True),
    VariableSpec("dense/bias", (6,), "float32", True),
    VariableSpec("norm/moving_mean", (6,), "float32", False),
    VariableSpec("norm/count", (), "int64", False),
)
TRAINABLE = [index for index, spec in enumerate(SPECS) if spec.trainable]


class RowNorms(keras.optimizers.Optimizer):
    """A user's own that reduces over rows: divides by the mean of the last three norms of a row's gradients.

    It keeps [rows, 3], [rows], the variable's shape, and something that is not of rows.
    """

    rowwise = True

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.norms = [self.add_variable((*v.shape[:1], 3), "ones", name="norms") for v in variables]
        self.counts = [self.add_variable(v.shape[:1], name="counts") for v in variables]
        self.memory = [self.add_variable_from_reference(v, name="memory") for v in variables]
        self.total = self.add_variable((), name="total")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = self._get_variable_index(variable)
        norms, counts, memory = self.norms[index], self.counts[index], self.memory[index]
        gradient = keras.ops.cast(gradient, "float32")
        norm = keras.ops.sqrt(keras.ops.sum(gradient**2, axis=tuple(range(1, len(variable.shape)))))
        self.assign(norms, keras.ops.concatenate([norms[..., 1:], norm[..., None]], -1))
        self.assign_add(counts, keras.ops.ones_like(norm))
        divisor = keras.ops.mean(norms, -1) + 1 / counts
        if len(variable.shape) > 1:
            divisor = keras.ops.reshape(divisor, (-1, *(1 for _ in variable.shape[1:])))
        self.assign(memory, 0.5 * memory + keras.ops.cast(gradient / divisor, memory.dtype))
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * memory)


def initial_values(specs: Sequence[VariableSpec] = SPECS, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [
        (generator.normal(size=spec.shape) * 10 + 1).astype(dtype_of(spec.dtype))
        if spec.dtype.startswith("int")
        else generator.normal(size=spec.shape).astype(dtype_of(spec.dtype))
        for spec in specs
    ]


def movements(step: int, specs: Sequence[VariableSpec] = SPECS) -> dict[int, np.ndarray]:
    """How far a worker has moved all trained variables, by index."""
    generator = np.random.default_rng(1000 + step)
    return {
        index: generator.normal(size=spec.shape).astype(dtype_of(spec.dtype))
        for index, spec in enumerate(specs)
        if spec.trainable and not spec.table
    }


def alone(make_optimizer: Callable[[], Any] | None) -> Callable[[int], list[Any]] | None:
    """As servers take it: what makes all optimizers of a model."""
    return None if make_optimizer is None else lambda count: [make_optimizer()]


class Part:
    """One server's parameters without a server around them."""

    def __init__(
        self,
        make_optimizer: Callable[[], Any] | None,
        values: Sequence[np.ndarray],
        specs: Sequence[VariableSpec] = SPECS,
        num_ps: int = 1,
        index: int = 0,
        split: bool = False,
    ) -> None:
        self.specs = specs
        self.slices = partition(specs, num_ps, split)[index]
        own = {
            part.variable: values[part.variable]
            .reshape(-1)[part.start : part.stop]
            .reshape(part.shape(specs[part.variable]))
            for part in self.slices
        }
        optimizers = Optimizers() if make_optimizer is None else described([make_optimizer()], specs)
        self.parameters = Parameters(specs, self.slices, alone(make_optimizer), own, optimizers=optimizers)

    def push(self, moved: Mapping[int, np.ndarray], batches: int = 1, **more: Any) -> None:
        self.parameters.merge([self.make(moved, batches, **more)])

    def make(self, moved: Mapping[int, np.ndarray], batches: int = 1, base: int = -1, **optimizers: Any) -> Push:
        """A movement; `optimizers` are fields of `OptimizerState`."""
        state = cut_state(OptimizerState(**optimizers), self.specs, self.slices)
        blocks = pack(moved, self.specs, self.slices, True)
        return self.parameters.checked(Push(batches, blocks, optimizers=to_tensors(state), base=base))

    def values(self) -> list[np.ndarray]:
        """Whole variables; what other servers hold is zero."""
        arrays = [np.zeros(spec.shape, dtype_of(spec.dtype)) for spec in self.specs]
        snapshot = self.parameters.snapshot()
        for trainable, blocks in ((True, snapshot.weights), (False, snapshot.state)):
            unpack(blocks, self.specs, self.slices, trainable, arrays)
        return arrays


def assert_same(one, other):
    """Of two lists of arrays."""
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def exported(parameters, since=None):
    """What a server holds, as a `Part`; of tables the rows trained after version `since`."""
    return replace(parameters.dense(), tables=parameters.tables.export(since))


def read_part(path: Path) -> shard_file.Part:
    """The inverse of `write_part`, of any server; tables stay in the file until they are read."""
    with shard_file.opened(path) as file:
        metadata, names = file.metadata(), list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names if kind_of(name) != TABLE}
    return shard_file.Part(
        int(metadata["version"]),
        by_index(WEIGHT, tensors),
        from_tensors(only(tensors, SLOTS, EXTRAS, SHARED), shard_file.optimizers_in(metadata)),
        {number: shard_file.SavedTable(number, [path], (0, ShardMap(1))) for number in shard_file.tables_in(names)},
        ages=by_index(AGES, tensors),
    )


def saved(directory, parts, specs, version):
    """A checkpoint of what servers hold: its folder."""
    folder = begin_version(directory, version)
    files = [
        write_part(folder / server_file(index, len(parts)), exported(part.parameters))
        for index, part in enumerate(parts)
    ]
    return finish_version(
        folder, version=version, specs=specs, parts=[p.slices for p in parts], files=files, extra={"epoch": 2}
    )


def push_frame(
    moved: Mapping[int, np.ndarray],
    slices: Sequence[Any],
    specs: Sequence[VariableSpec] = SPECS,
    rows: Mapping[int, tuple[Any, Any]] | None = None,
    state: Mapping[str, np.ndarray] | None = None,
    **header: Any,
) -> Frame[pb.ExchangeRequest]:
    """A movement of one batch, unless `batches` are given; without `moved`, rows alone, or a pull."""
    tensors = {f"moved/{dtype}": block for dtype, block in pack(moved, specs, slices, True).items()} if moved else {}
    for index, (ids, values) in (rows or {}).items():
        tensors[f"rows/{index}/ids"] = np.asarray(ids, np.int64)
        tensors[f"rows/{index}/values"] = np.asarray(values)
    tensors |= {f"state/{dtype}": block for dtype, block in (state or {}).items()}
    tensors |= {f"shares/{dtype}": np.ones(len(block), np.float32) for dtype, block in (state or {}).items()}
    fields = {"worker_id": 1, "known_version": -1, "known_state_version": -1, "base": -1, **header}
    return Frame(pb.ExchangeRequest(**{"batches": int(bool(moved)), **fields}), tensors)


# Large enough to be cut in two.
CUT = (
    VariableSpec("dense/kernel", (300, 64), "float32", True),
    VariableSpec("dense/bias", (64,), "float32", True),
    VariableSpec("norm/moving_mean", (64,), "float32", False),
)


def sgd():
    return keras.optimizers.SGD(0.5)


def server_settings(folder: object = "", **sections: Any) -> JobSettings:
    """Of a job in a folder, as servers get them."""
    return JobSettings(command=Command.TRAIN, name="test", directory=str(folder), model=ModelSettings(), **sections)


class Cluster:
    """Some servers and a connection to each."""

    def __init__(
        self, num_ps=1, specs=SPECS, make_optimizer=sgd, split=True, num_workers=1, lost_workers=(), **training
    ):
        self.specs, self.split, self.num_ps = specs, split, num_ps
        self.optimizers = Optimizers() if make_optimizer is None else described([make_optimizer()], specs)
        settings = server_settings(
            training=TrainingSettings(**{"updates": "async", **training}),
            cluster=ClusterSettings(num_workers=num_workers),
        )
        make_optimizers = alone(make_optimizer)
        self.servers = [PSServer(settings, make_optimizers, lost_workers=lost_workers) for _ in range(num_ps)]
        for server in self.servers:
            server.start()
        self.connections = []
        self._first = [self.connection(index) for index in range(num_ps)]
        self.slices = partition(specs, num_ps, split)
        self.clients = []

    def client(self, number=0):
        """The master's, or a worker's."""
        addresses = [server.address for server in self.servers]
        self.clients.append(TrainingControl(addresses, self.specs, self.split, number, 5.0, optimizers=self.optimizers))
        return self.clients[-1]

    def connection(self, index):
        name = f"parameter server {index}"
        self.connections.append(Connection(self.servers[index].address, name, patience_seconds=5))
        return self.connections[-1]

    def call(self, index, method, frame, connection=None):
        return (connection or self._first[index]).call(replace(PS_METHODS[method], shared=False), frame)

    def initialize(self, values=None, folder=""):
        for index, slices in enumerate(self.slices):
            tensors = {}
            if values is not None:
                for kind, trainable in (("weights", True), ("state", False)):
                    blocks = pack(values, self.specs, slices, trainable)
                    tensors |= {f"{kind}/{dtype}": block for dtype, block in blocks.items()}
            request = pb.InitializeRequest(
                variables=[spec.to_message() for spec in self.specs],
                num_ps=self.num_ps,
                index=index,
                split=self.split,
                checkpoint=str(folder),
                optimizers=self.optimizers.names,
                periods=self.optimizers.periods,
                learning_rate=self.optimizers.learning_rate,
            )
            self.call(index, "Initialize", Frame(request, tensors))

    def frame(self, moved, index=0, **header):
        return push_frame(moved, self.slices[index], self.specs, **header)

    def push(self, moved, index=0, **header):
        return self.call(index, "Exchange", self.frame(moved, index, **header))

    def values(self, snapshot=0):
        arrays = [np.zeros(spec.shape, spec.dtype) for spec in self.specs]
        for index, slices in enumerate(self.slices):
            answer = self.push({}, index, pull=True, snapshot=snapshot)
            for kind, trainable in (("weights", True), ("state", False)):
                blocks = {name.split("/")[1]: array for name, array in answer.tensors.items() if name.startswith(kind)}
                unpack(blocks, self.specs, slices, trainable, arrays)
        return arrays

    def close(self):
        for each in (*self.clients, *self.connections):
            each.close()
        for server in self.servers:
            server.stop(0)


def train_rows(table: EmbeddingTable, ids: Any, gradients: Any, apply: Callable[..., Any], version: int) -> None:
    """Updates rows by `apply`, from (rows, slots, gradients) to (rows, slots)."""
    change = table.prepare(ids, gradients)
    if len(change.ids):
        table.commit(change, *apply(change.rows, change.slots, change.gradients), version)
    else:
        table.advance(version)
