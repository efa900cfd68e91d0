"""Models, optimizers and pushes that the parameter servers' tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from ps_clients import TrainingControl

from elasticcb.checkpoint.parts import save_part
from elasticcb.checkpoint.versions import begin_version, finish_version
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.parameters import Parameters
from elasticcb.ps.push_reader import PushReader
from elasticcb.ps.server import PSServer
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame, dtype_of
from elasticcb.settings import Command, JobSettings, ModelSettings, TrainingSettings
from elasticcb.sharding.partition import VariableSpec, pack, partition, unpack
from elasticcb.sharding.push import Push, Rows

SPECS = (
    VariableSpec("embedding/embeddings", (12, 4), "float32", True),
    VariableSpec("dense/kernel", (4, 6), "float32", True),
    VariableSpec("dense/bias", (6,), "float32", True),
    VariableSpec("norm/moving_mean", (6,), "float32", False),
    VariableSpec("norm/count", (), "int64", False),
)
TRAINABLE = [index for index, spec in enumerate(SPECS) if spec.trainable]


class Signed(keras.optimizers.Optimizer):
    """A user's own optimizer: momentum on the signs of the gradient."""

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.memory = [self.add_variable_from_reference(v, name="memory") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        memory = self.memory[self._get_variable_index(variable)]
        self.assign(memory, 0.9 * memory + keras.ops.sign(gradient))
        self.assign_sub(variable, learning_rate * memory)


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


def gradients(step: int, specs: Sequence[VariableSpec] = SPECS) -> dict[int, np.ndarray]:
    generator = np.random.default_rng(1000 + step)
    return {
        index: generator.normal(size=spec.shape).astype(dtype_of(spec.dtype))
        for index, spec in enumerate(specs)
        if spec.trainable
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
        self.parameters = Parameters(specs, self.slices, alone(make_optimizer), own)
        self.reader = PushReader(specs, self.slices)

    def push(self, dense: Mapping[int, np.ndarray], rows: Mapping[int, tuple[Any, Any]] | None = None) -> None:
        self.parameters.apply(self.make(dense, rows))

    def make(
        self,
        dense: Mapping[int, np.ndarray],
        rows: Mapping[int, tuple[Any, Any]] | None = None,
        learning_rate: float | None = None,
    ) -> Push:
        held = tuple(sorted({part.variable for part in self.slices} & set(dense)))
        pairs = {i: Rows(np.asarray(ids, np.int64), values) for i, (ids, values) in (rows or {}).items()}
        blocks = pack(dense, self.specs, self.slices, True, held)
        return Push(held, blocks, pairs, learning_rate=learning_rate)

    def values(self) -> list[np.ndarray]:
        """Whole variables; what other servers hold is zero."""
        arrays = [np.zeros(spec.shape, dtype_of(spec.dtype)) for spec in self.specs]
        for trainable, blocks in ((True, self.parameters.weights()), (False, self.parameters.snapshot().state)):
            unpack(blocks, self.specs, self.slices, trainable, arrays)
        return arrays


def exported(parameters, since=None):
    """What a server holds, as a `Part`; of tables the rows trained after version `since`."""
    return replace(parameters.dense(), tables=parameters.tables.export(since))


def saved(directory, parts, specs, version):
    """A checkpoint of what servers hold: its folder."""
    folder = begin_version(directory, version)
    files = [
        save_part(folder, exported(part.parameters), part.slices, index, len(parts)) for index, part in enumerate(parts)
    ]
    return finish_version(
        folder, version=version, specs=specs, parts=[p.slices for p in parts], files=files, extra={"epoch": 2}
    )


def plain_keras(
    make_optimizer: Callable[[], Any], values: Sequence[np.ndarray], steps: Sequence[dict[int, np.ndarray]]
) -> tuple[dict[int, np.ndarray], Any]:
    """What Keras makes of the same gradients in one process."""
    optimizer = make_optimizer()
    variables = {
        index: keras.Variable(values[index], dtype=SPECS[index].dtype, name=SPECS[index].path.split("/")[-1])
        for index in TRAINABLE
    }
    optimizer.build(list(variables.values()))
    import tensorflow as tf

    apply = tf.function(lambda *grads: optimizer.apply(list(grads), list(variables.values())))
    for step in steps:
        apply(*[tf.constant(step[index]) for index in TRAINABLE])
    return {index: variable.numpy() for index, variable in variables.items()}, optimizer


def push_frame(
    dense: Mapping[int, np.ndarray],
    slices: Sequence[Any],
    specs: Sequence[VariableSpec] = SPECS,
    rows: Mapping[int, tuple[Any, Any]] | None = None,
    state: Mapping[str, np.ndarray] | None = None,
    **header: Any,
) -> Frame[pb.ExchangeRequest]:
    held = {part.variable for part in slices} & set(dense)
    tensors = {f"gradients/{d}": block for d, block in pack(dense, specs, slices, True, held).items()}
    for index, (ids, values) in (rows or {}).items():
        tensors[f"rows/{index}/ids"] = np.asarray(ids, np.int64)
        tensors[f"rows/{index}/values"] = np.asarray(values)
    tensors |= {f"state/{dtype}": block for dtype, block in (state or {}).items()}
    tensors |= {f"shares/{dtype}": np.ones(len(block), np.float32) for dtype, block in (state or {}).items()}
    fields = {"worker_id": 1, "known_version": -1, "known_state_version": -1, **header}
    return Frame(pb.ExchangeRequest(dense_variables=sorted(dense), **fields), tensors)


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

    def __init__(self, num_ps=1, specs=SPECS, make_optimizer=sgd, split=True, make_optimizers=None, **training):
        self.specs, self.split, self.num_ps = specs, split, num_ps
        self.synchronous = not training.get("use_async", True)
        settings = server_settings(training=TrainingSettings(**{"updates": "async", **training}))
        self.servers = [PSServer(settings, make_optimizers or alone(make_optimizer)) for _ in range(num_ps)]
        for server in self.servers:
            server.start()
        self.connections = [
            Connection(server.address, f"parameter server {index}", patience_seconds=5)
            for index, server in enumerate(self.servers)
        ]
        self.slices = partition(specs, num_ps, split)
        self.clients = []

    def client(self, number=0):
        """The master's, or a worker's."""
        addresses = [server.address for server in self.servers]
        self.clients.append(TrainingControl(addresses, self.specs, self.split, number, self.synchronous, 5.0))
        return self.clients[-1]

    def call(self, index, method, frame):
        return self.connections[index].call(replace(PS_METHODS[method], shared=False), frame)

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
                ps_addresses=[server.address for server in self.servers],
            )
            self.call(index, "Initialize", Frame(request, tensors))

    def frame(self, dense, index=0, **header):
        return push_frame(dense, self.slices[index], self.specs, **header)

    def push(self, dense, index=0, **header):
        return self.call(index, "Exchange", self.frame(dense, index, **header))

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
