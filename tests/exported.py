"""Reads exports as a client does that has only their description (docs/serving.md)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

from elasticcb.checkpoint.shard_file import SavedFile, check_file
from elasticcb.serving.exports import CURRENT, IDS, WEIGHTS, Current


def current(folder: Path) -> Current:
    return Current.of((folder / CURRENT).read_bytes(), str(folder))


class Export:
    """The weights at a version: dense ones by index, rows of tables by index and id.

    Attributes:
        model: the SavedModel of the full export.
        gone: how many ids deltas have removed.
    """

    def __init__(self, folder: Path, way: list[str]) -> None:
        full, *deltas = way
        self.gone = 0
        manifest = self._manifest(folder / full)
        for file in manifest["extra"]["export"]["files"]:
            check_file(folder / full / file["name"], SavedFile.of(file))
        self.variables = manifest["variables"]
        self.model = tf.saved_model.load(str(folder / full))
        values = [variable.numpy() for variable in getattr(self.model, WEIGHTS)]
        ids = iter([variable.numpy() for variable in getattr(self.model, IDS)])
        self.dense, self.tables = {}, {}
        for index, (value, variable) in enumerate(zip(values, self.variables, strict=True)):
            if "table" not in variable:
                self.dense[index] = value
            else:
                free = json.loads(variable["table"])["initializer"]
                self.tables[index] = dict(zip((next(ids) if free else range(len(value))), value, strict=True))
        assert next(ids, None) is None
        for name in deltas:
            self._apply(folder / name)

    @staticmethod
    def _manifest(folder: Path) -> dict:
        return json.loads((folder / "manifest.json").read_text())

    def _apply(self, folder: Path) -> None:
        for server in self._manifest(folder)["servers"]:
            (file,) = server["files"]
            check_file(folder / file["name"], SavedFile.of(file))
            arrays = load_file(folder / file["name"])
            assert {name.split("/")[0] for name in arrays} <= {"weight", "table", "gone"}, arrays.keys()
            for variable, start, stop in server["slices"]:
                whole = self.dense[variable] = np.array(self.dense[variable])
                whole.reshape(-1)[start:stop] = arrays[f"weight/{variable}"].reshape(-1)
            for index, rows in self.tables.items():
                gone = arrays.get(f"gone/{index}", np.empty(0, np.int64))
                self.gone += len(gone)
                for id in gone:
                    rows.pop(id, None)
                if f"table/{index}/ids" in arrays:
                    assert not [name for name in arrays if name.startswith(f"table/{index}/slots")]
                    rows.update(zip(arrays[f"table/{index}/ids"], arrays[f"table/{index}/rows"], strict=True))
