"""Servers that stop without a goodbye, and others that take their places as the master has them do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
from ps_clients import TrainingControl, client_of

from elasticcb.optimizers.state import ModelState, OptimizerState, to_tensors
from elasticcb.optimizers.variables import described
from elasticcb.ps.server import PSServer
from elasticcb.settings import (
    RECOVERY_FOLDER,
    CheckpointSettings,
    ClusterSettings,
    EmbeddingOptions,
    RowsDtype,
    TrainingSettings,
    WhenFull,
    WireDtype,
)
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.partition import VariableSpec, block_sizes
from elasticcb.sharding.push import Movement
from elasticcb.sharding.table_state import TableSpec
from helpers_ps import server_settings

INITIALIZER = json.dumps(keras.saving.serialize_keras_object(keras.initializers.RandomUniform()))
SPECS = (
    VariableSpec("first/kernel", (6,), "float32", True),
    VariableSpec("second/kernel", (6,), "float32", True),
    VariableSpec("norm/mean", (2,), "float32", False),
    VariableSpec("emb/embeddings", (0, 3), "float32", True, table=TableSpec(None, INITIALIZER, 7).to_json()),
)
ROUNDED = (
    *SPECS[:3],
    replace(
        SPECS[3],
        table=TableSpec(None, INITIALIZER, 7, TableOptions(rows_dtype=RowsDtype.BFLOAT16)).to_json(),
    ),
)
SIZES = (6, 6, 2)
VALUES = [*(np.arange(size, dtype=np.float32) for size in SIZES), np.zeros((0, 3), np.float32)]
IDS = np.arange(12)
ON_DISK = EmbeddingOptions(memory_bytes=260, when_full=WhenFull.DISK)  # all rows but three


class Servers:
    """Some servers, and two clients: a worker's and the master's, which lets them write files.

    Args:
        interval: 0: the master keeps no files.
        embedding: settings of embedding tables.
        specs: of the model's variables.
        training: settings of it.
    """

    def __init__(self, folder, num_ps=1, interval=1000.0, embedding=None, specs=SPECS, **training):
        self.specs = specs
        self.settings = server_settings(
            folder,
            training=TrainingSettings(**{"updates": "async", **training}),
            checkpoint=CheckpointSettings(interval_seconds=interval),
            cluster=ClusterSettings(num_ps=num_ps),
            embedding=embedding or EmbeddingOptions(),
        )
        self.servers, self.ids, self.lost = [None] * num_ps, [0] * num_ps, set()
        for index in range(num_ps):
            self.start(index)
        given = (self.addresses, specs, True)
        optimizers = described([keras.optimizers.Adam(0.1)], specs)
        more = {"optimizers": optimizers, "patience_seconds": 5.0}
        keeps = Path(self.settings.directory, RECOVERY_FOLDER) if interval else None
        self.master = TrainingControl(*given, ids=self.ids, find=self.find, folder=keeps, **more)
        self.worker = client_of(
            *given,
            client_id=1,
            ids=self.ids,
            find=self.find,
            wire_dtype=WireDtype(self.settings.training.wire_dtype),
        )
        self.master.initialize(ModelState(VALUES))

    @property
    def addresses(self):
        return [server.address for server in self.servers]

    def find(self, index, unreachable=0):
        return self.addresses[index], self.ids[index]

    def start(self, index):
        self.servers[index] = PSServer(self.settings, lambda count: [keras.optimizers.Adam(0.1) for _ in range(count)])
        self.ids[index] += 1
        self.servers[index].start()

    def lose(self, *indices):
        for index in indices:
            self.servers[index].stop(0)
            self.lost.add(index)

    def replace(self, index=0, version=0, evaluation_round=0, learning_rate=None):
        """As the master does it; the server is lost by then, or is lost now."""
        if index not in self.lost:
            self.lose(index)
        self.start(index)
        place, source = self.find(index), lambda: ModelState(VALUES)
        restored = self.master.restore(index, *place, version, source, evaluation_round, learning_rate)
        self.lost.discard(index)
        return restored

    def push(self, step, ids=(1, 2, 5, 8)):
        """A worker's batch: gradients of rows, and how far the others have moved since the present weights."""
        self.worker.lookup({3: np.array(ids)}, create=True)
        self.worker.pull()
        return self.worker.push(self.movement(step, ids), self.worker.versions)

    def movement(self, step, ids):
        """What `push` hands over."""
        generator = np.random.default_rng(step)
        rows = {3: (np.array(ids), generator.normal(size=(len(ids), 3)).astype(np.float32))}
        moved, state, shares = [], [], []
        for slices in self.worker.servers.partition:
            sizes = block_sizes(self.specs, slices, True).items()
            moved.append({dtype: generator.normal(size=size).astype(dtype) for dtype, size in sizes})
            sizes = block_sizes(self.specs, slices, False).items()
            state.append({dtype: generator.normal(size=size).astype(dtype) for dtype, size in sizes})
            shares.append({dtype: np.ones(size, np.float32) for dtype, size in sizes})
        slots = {
            (index, name): generator.normal(size=6).astype(np.float32)
            for index in (0, 1)
            for name in ("momentum", "velocity")
        }
        shared = {"iterations": np.int64(self.worker.version + 1), "learning_rate": np.float32(0.1)}
        held = to_tensors(OptimizerState(slots, {}, shared))
        return Movement(1, self.worker.servers.partition, moved, state, shares, rows, held)

    def model(self, index):
        return self.servers[index]._servicer.holder.model

    def write(self):
        self.master.persist()

    def held(self):
        weights, _ = self.master.weights(self.worker.pull())
        return [*weights[:3], self.worker.lookup({3: IDS})[3]]

    def exported(self):
        return self.master.export().optimizer

    def close(self):
        self.worker.servers.close()
        self.master.close()
        for server in self.servers:
            server.stop(0)
