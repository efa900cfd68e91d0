"""Exports as `PeriodicExport` writes them, of a model whose weights the test sets."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

import keras
import numpy as np

import elasticcb
from elasticcb.checkpoint.manifest import write_manifest
from elasticcb.checkpoint.shard_file import Part, SavedFile, write_part
from elasticcb.layers.table_layers import is_own, table_layers
from elasticcb.model.weights import variable_specs
from elasticcb.serving.exports import CURRENT, Current, Export
from elasticcb.serving.full_export import write_saved_model
from elasticcb.sharding.partition import ShardMap, partition
from elasticcb.sharding.table_state import TableSpec, TableState
from elasticcb.storage import durable

USERS, DIM = 5, 2


def small_model() -> keras.Model:
    """Strings and ids in, a score, a row of each table, and how many examples there are, out."""
    user = keras.Input((1,), dtype="string", name="user")
    item = keras.Input((2,), dtype="int64", name="item")
    number = keras.layers.StringLookup(vocabulary=["ann", "bob", "eve", "zoe"])(user)
    users = keras.layers.Flatten(name="user_row")(keras.layers.Embedding(USERS, DIM, name="users")(number))
    layer = elasticcb.layers.Embedding(DIM, embeddings_initializer="zeros", combiner="mean", name="items")
    items = keras.layers.Identity(name="item_row")(layer(item))
    score = keras.layers.Dense(1, name="score")(keras.layers.Concatenate()([users, items]))
    return keras.Model({"user": user, "item": item}, [score, users, items])


class MadeExports:
    """Trains and exports.

    Args:
        model: its tables are those of its embedding layers.
        servers: that write a delta.
    """

    def __init__(self, folder: Path, model: keras.Model | None = None, servers: int = 1) -> None:
        self.folder, self.servers, self.exporter = folder, servers, secrets.token_hex(4)
        self.model = model or small_model()
        self._layers = {index: layers[0] for index, layers in table_layers(self.model).items()}
        initial = keras.saving.serialize_keras_object(keras.initializers.Constant(0.5))
        specs = {
            index: layer.table_spec() if is_own(layer) else TableSpec(layer.input_dim, json.dumps(initial))
            for index, layer in self._layers.items()
        }
        self.specs = variable_specs(self.model, tables=specs)
        self.version, self.way = 0, []
        self._gone: dict[int, set[int]] = {index: set() for index in self._layers}
        self._changed: dict[int, set[int]] = {index: set() for index in self._layers}

    def table(self, name: str) -> int:
        return next(index for index, layer in self._layers.items() if layer.name == name)

    def set_rows(self, name: str, ids, rows) -> None:
        """As training does: other rows stay."""
        index = self.table(name)
        layer = self._layers[index]
        if is_own(layer):
            held = dict(zip(*layer.rows(), strict=True)) | dict(zip(ids, rows, strict=True))
            layer.set_rows(list(held), np.array(list(held.values()), np.float32).reshape(-1, layer.output_dim))
        else:
            held = layer.embeddings.numpy()
            held[ids] = rows
            layer.embeddings.assign(held)
        self._changed[index] |= set(ids)

    def remove(self, name: str, ids) -> None:
        index = self.table(name)
        layer = self._layers[index]
        if is_own(layer):
            held = {id: row for id, row in zip(*layer.rows(), strict=True) if id not in ids}
            layer.set_rows(list(held), np.array(list(held.values()), np.float32).reshape(-1, layer.output_dim))
        else:
            held = layer.embeddings.numpy()
            held[ids] = 0.5
            layer.embeddings.assign(held)
        self._gone[index] |= set(ids)
        self._changed[index] -= set(ids)

    def set_all(self, value: float, ids=(3, 4)) -> None:
        """All outputs become this value: the score is the bias."""
        kernel, bias = self.model.get_layer("score").get_weights()
        self.model.get_layer("score").set_weights([kernel * 0, bias * 0 + value])
        self.set_rows("users", range(USERS), np.full((USERS, DIM), value, np.float32))
        self.set_rows("items", ids, np.full((len(ids), DIM), value, np.float32))

    def train(self, seed: int, new: int = 2) -> None:
        """Changes some of everything."""
        random = np.random.default_rng(seed)
        dense = self.model.get_layer("score")
        dense.set_weights([random.normal(size=array.shape).astype(np.float32) for array in dense.get_weights()])
        for name, ids in (("users", [seed % USERS]), ("items", [*range(3), *random.integers(10, 10**12, new)])):
            self.set_rows(name, ids, random.normal(size=(len(ids), DIM)).astype(np.float32))

    def full(self, version: int) -> str:
        """Also a delta to it, if there is something before it."""
        before = self.delta(version, current=False) if self.way else None
        export = self._export(version, None)
        folder = self.folder / export.name
        write_saved_model(self.model, None, [layer for layer in self._layers.values() if is_own(layer)], folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        saved = [SavedFile(str(path.relative_to(folder)), *durable.digest_of(path), version) for path in files]
        export = Export(**{**vars(export), "files": tuple(saved)})
        write_manifest(folder, version=version, specs=self.specs, parts=[], files=[], extra=export.to_extra())
        self.way = [export.name]
        self._finish(export)
        return before or export.name

    def delta(self, version: int, current: bool = True) -> str:
        export = self._export(version, self.version)
        folder, shard_map = self.folder / export.name, ShardMap(self.servers)
        folder.mkdir(parents=True)
        parts = partition(self.specs, self.servers, True)
        files = []
        for server, slices in enumerate(parts):
            weights = {
                held.variable: held.of(self.model.weights[held.variable].numpy(), self.specs[held.variable])
                for held in slices
            }
            tables, gone = {}, {}
            for index, ids in self._changed.items():
                state = self._rows(index, np.array(sorted(ids), np.int64)).part(server, shard_map)
                removed = np.array(sorted(self._gone[index]), np.int64)
                gone[index] = removed[shard_map.owns(server, removed)]
                tables[index] = state
            path = folder / f"{server}.safetensors"
            files.append([write_part(path, Part(version, weights, tables=tables, gone=gone))])
        write_manifest(folder, version=version, specs=self.specs, parts=parts, files=files, extra=export.to_extra())
        self.way = [*self.way, export.name]
        if current:
            self._finish(export)
        return export.name

    def _rows(self, index: int, ids) -> TableState:
        layer = self._layers[index]
        held, rows = layer.rows() if is_own(layer) else (np.arange(USERS), layer.embeddings.numpy())
        return TableState(ids, rows[np.searchsorted(held, ids)])

    def _export(self, version: int, since: int | None) -> Export:
        now = time.time()
        return Export(version, since, self.exporter, "small", version, now)

    def publish(self, version: int) -> None:
        """Makes the newest delta current, whose version this is."""
        self._finish(self._export(version, None))

    def _finish(self, export: Export) -> None:
        self.version = export.version
        for ids in (*self._changed.values(), *self._gone.values()):
            ids.clear()
        full, *deltas = self.way
        current = Current(export.version, self.exporter, "small", full, tuple(deltas), export.written)
        durable.write(self.folder / CURRENT, current.to_json().encode(), durable.SHARED)

    def expected(self, features) -> list[np.ndarray]:
        """What the model answers: the score and a row of each table."""
        given = {name: keras.ops.convert_to_tensor(value) for name, value in features.items()}
        return [output.numpy() for output in self.model(given)]


FEATURES = {
    "user": np.array([["ann"], ["eve"], ["nobody"]], object),
    "item": np.array([[3, 4], [0, 10**11], [1, 1]], np.int64),
}
