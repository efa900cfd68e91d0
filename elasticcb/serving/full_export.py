"""Writes a full export, in another process: it rebuilds the model with Keras on TensorFlow, gives it the weights that
parameter servers have written, and writes a SavedModel. So training is not slowed, on any backend of Keras."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticcb.callbacks.saved_model_exporter import environment_of_exports
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.errors import CallbackError, CheckpointError, describe
from elasticcb.process.import_path import python_code
from elasticcb.process.system import is_full, show_as
from elasticcb.serving.exports import IDS, WEIGHTS
from elasticcb.storage import durable
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.local_folders import TemporaryFolder, files_below
from elasticcb.storage.remote_files import is_url

_MODEL, _RESULT, _LOG = "model", "result.json", "log"


class FullExport:
    """The process that writes one.

    Args:
        model: of `without_weights`.
        snapshot: place of a snapshot for serving.
        to: place of the folder to write.

    Raises `OSError` if it can't be started.
    """

    def __init__(self, model: bytes, snapshot: str, to: str) -> None:
        with contextlib.ExitStack() as on_error:
            self._folder = TemporaryFolder()
            on_error.callback(self._folder.remove)
            given = self._folder.path
            (given / _MODEL).write_bytes(model)
            command = [sys.executable, "-c", python_code(__name__), str(given), snapshot, to]
            with (given / _LOG).open("wb") as log:
                # It ends when its input does, with this process.
                self._process = subprocess.Popen(
                    command, env=environment_of_exports(), stdin=subprocess.PIPE, stdout=log, stderr=log
                )
            on_error.pop_all()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def files(self) -> list[SavedFile]:
        """What it has written, once it has ended.

        Raises:
            CallbackError: the model can't be exported.
            CheckpointError: it could not be written this time.
        """
        try:
            result = json.loads((self._folder.path / _RESULT).read_bytes())
        except (OSError, ValueError):
            log = (self._folder.path / _LOG).read_text(errors="replace")[-1000:]
            raise CheckpointError(
                f"The process that writes the full export ended with {self._process.returncode}. {log}".strip()
            ) from None
        if "files" in result:
            return [SavedFile.of(file) for file in result["files"]]
        if not result["is_of_model"]:
            raise CheckpointError(f"The full export could not be written: {result['error']}")
        raise CallbackError(
            f"The model can't be exported as a SavedModel: {result['error']}\nAnother process rebuilds the model with "
            "Keras on TensorFlow. Use only Keras operations in call()."
        )

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._process.kill()
        self._process.communicate()
        self._folder.remove()


def main() -> int:
    """The entry point of the process."""
    show_as("full export")
    threading.Thread(target=_end_with_master, daemon=True).start()
    given, snapshot, to = sys.argv[1:]
    result: dict[str, Any]
    from elasticcb.serving.loading import ForeignCheckpointError

    try:
        files = _write((Path(given) / _MODEL).read_bytes(), snapshot, to)
        result = {"files": [dataclasses.asdict(file) for file in files]}
    except Exception as error:
        of_place = isinstance(error, (CheckpointError, OSError)) or is_full(error)
        of_model = not of_place or isinstance(error, ForeignCheckpointError)
        result = {"error": describe(error), "is_of_model": of_model}
    durable.write(Path(given) / _RESULT, json.dumps(result).encode())
    return 0


def _end_with_master() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _write(model: bytes, snapshot: str, to: str) -> list[SavedFile]:
    with TemporaryFolder() if is_url(to) else contextlib.nullcontext(Path(to)) as place:
        folder = place / _MODEL if is_url(to) else place  # without the lock of a temporary folder
        version = _write_saved_model(model, snapshot, folder)
        durable.sync_all(folder)
        files = files_below(folder)
        if is_url(to):
            with JobStore(to) as store:
                for name, path in files:
                    store.put_file(name, path)
        return [SavedFile(name, *durable.digest_of(path), version) for name, path in files]


def _write_saved_model(model: bytes, snapshot: str, folder: Path) -> int:
    """Returns the version of the model."""
    import tensorflow as tf

    from elasticcb.layers.table_layers import is_own, table_layers
    from elasticcb.serialization import carry
    from elasticcb.serving.loading import load_version

    content = carry.loads(model)
    rebuilt = content["model"]
    version = load_version(rebuilt, snapshot)
    own = [layers[0] for _, layers in sorted(table_layers(rebuilt).items()) if is_own(layers[0])]
    for layer in own:  # on another backend, it is not a variable
        layer._ids = tf.Variable(layer.ids.numpy(), shape=[None], trainable=False, name="ids")
    write_saved_model(rebuilt, content["features_spec"], own, folder)
    return version


def write_saved_model(model: Any, features_spec: Any, own: Sequence[Any], folder: Path) -> None:
    """Writes the SavedModel of a full export.

    Args:
        features_spec: as in `add_serving_endpoint`.
        own: the model's `elasticcb.layers.Embedding`s.
    """
    import keras

    from elasticcb.callbacks.serving_signature import add_serving_endpoint
    from elasticcb.keras_private import value_of

    archive = keras.export.ExportArchive()
    add_serving_endpoint(archive, model, features_spec)
    # TensorFlow's variables, as the endpoint has them: Keras's would be written once more.
    archive.add_variable_collection(WEIGHTS, [value_of(each) for each in model.weights])
    archive.add_variable_collection(IDS, [layer.ids for layer in own])
    archive.write_out(str(folder), verbose=False)
