"""Exports the trained model as a SavedModel for serving without ElasticCB and Keras.

Keras on PyTorch can't write one: another process rebuilds the model with Keras on TensorFlow, and exports it.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from elasticcb.callbacks.serving_signature import add_serving_endpoint
from elasticcb.errors import CallbackError, describe, user_traceback
from elasticcb.process.devices import hide_gpus
from elasticcb.process.import_path import python_code
from elasticcb.process.system import is_full, show_as
from elasticcb.serialization import carry
from elasticcb.serialization.reducers import Hollow
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import held
from elasticcb.storage.local_folders import next_numbered, problem_of_folder

logger = logging.getLogger(__name__)

# Attributes that `compile` and a job set on a model.
_OF_TRAINING = (
    "compiled", "loss", "optimizer", "compute_loss", "compute_metrics", "train_step", "test_step",
    "_compile_config", "_compile_metrics", "_compile_loss", "_loss_tracker",
)  # fmt: skip
_MODEL, _WEIGHTS, _ERROR = "model", "model.weights.h5", "error"


class SavedModelExporter(keras.callbacks.Callback):
    """Exports the model when training ends, on the worker with the TRAIN_END task.

    The signature `serving_default` takes each feature by name: the keys of a dict of features; for a single tensor, the
    name of the model's input if the user named it, else `features`. Characters that are invalid in a Python name become
    `_`. It returns each output by name: the keys of a dict of outputs; names of output layers that the user named; else
    `predictions`, or `output_0`, `output_1`, … `tf.saved_model.load(path).serve(features)` takes features in the
    structure of the model's inputs.

    The model is written next to its target and then renamed, so the target is always a complete model.

    Args:
        saved_model_path: local folder; default: `--output` (`params["saved_model_path"]`). A folder that contains
            anything but a SavedModel is refused, not replaced.

    Example:

        def callbacks():
            return [SavedModelExporter("/models/digits")]

        # anywhere else
        model = tf.saved_model.load("/models/digits")
        model.signatures["serving_default"](features=images)["predictions"]
    """

    essential = True  # read by the dispatcher: without the model, the job has failed

    def __init__(self, saved_model_path: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._saved_model_path = saved_model_path

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        target = self._target()  # reports an unwritable path before hours of training, not after
        problem = problem_of_folder(target.parent)
        if problem:
            raise CallbackError(
                f"The model can't be exported to {target}: its folder {problem}. Choose another folder with "
                "SavedModelExporter(saved_model_path=...), or with `elasticcb train --output=FOLDER`."
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.export()

    def export(self, numbered: bool = False) -> Path:
        """Returns the folder: if `numbered`, the next number next to the given one when it is renamed into place."""
        target = self._target()
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.exporting-{uuid.uuid4().hex}")
        try:
            fresh.mkdir()
            with held(fresh):
                self._write(fresh)
                target = _replace(target, fresh, numbered)
        except Exception as error:
            if is_full(error):
                raise CallbackError(
                    f"The disk is full: the model can't be exported to {target}. An earlier export there is unchanged. "
                    "Free some space and try again."
                ) from error
            raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        logger.info("Wrote the SavedModel to %s", target)
        return target

    def _write(self, folder: Path) -> None:
        if not getattr(self.model, "built", False):
            raise CallbackError(
                f"The model {type(self.model).__name__} has no weights yet, so there is nothing to export. "
                "Build it first, or train at least one batch."
            )
        if _needs_another_process(self.model):
            _export_elsewhere(self.model, (self.params or {}).get("features_spec"), folder)
            return
        archive = keras.export.ExportArchive()
        add_serving_endpoint(archive, self.model, (self.params or {}).get("features_spec"))
        try:
            archive.write_out(str(folder), verbose=False)
        except Exception as error:
            if is_full(error):
                raise
            raise CallbackError(
                f"The model {type(self.model).__name__} can't be written as a SavedModel to {folder.parent}: "
                f"{type(error).__name__}: {error}. Use only TensorFlow or Keras operations in call(), and make lookup "
                "tables attributes of the model or of its layers.",
                user_traceback(error),
            ) from error

    def _target(self) -> Path:
        path = self._saved_model_path or (self.params or {}).get("saved_model_path")
        if not path:
            raise CallbackError(
                "SavedModelExporter has no folder to export to. Pass SavedModelExporter(saved_model_path=...), or "
                "`elasticcb train --output=/path/to/model`."
            )
        text = os.fspath(path)
        if "://" in text:
            raise CallbackError(
                f"SavedModelExporter writes to a local folder. Received: {text!r}. Export to a local folder, "
                f"and add ModelUploader({text!r}) to callbacks()."
            )
        # The link itself is the user's, so the folder that it points to is replaced.
        target = Path(os.path.realpath(os.path.expanduser(text)))
        is_model = (target / "saved_model.pb").is_file()
        if target.exists() and not is_model and (not target.is_dir() or any(target.iterdir())):
            raise CallbackError(
                f"{target} exists and is not a SavedModel, so it is not replaced. Choose a folder that does not "
                "exist, is empty, or contains an exported model; or move its files."
            )
        return target


def _replace(target: Path, fresh: Path, numbered: bool) -> Path:
    """Replaces `target`, or the number that is next now, by the folder `fresh`; if that fails, it is unchanged."""
    durable.sync_all(fresh)
    with held(target.parent, waits=True):  # against others that export to the same place
        target = next_numbered(target.parent) if numbered else target
        old = target.with_name(f".{target.name}.replaced-{uuid.uuid4().hex}")
        had_one = target.exists()
        if had_one:
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if had_one:
                old.rename(target)
            raise
        durable.sync(target.parent)
        # Also removes leftovers of killed exporters.
        for pattern in ("replaced", "exporting"):
            for leftover in target.parent.glob(f".{target.name}.{pattern}-*"):
                with contextlib.suppress(OSError), held(leftover) as is_free:
                    if is_free:
                        shutil.rmtree(leftover)
    return target


def _needs_another_process(model: keras.Model) -> bool:
    """Whether Keras can't export it here."""
    return any(kind.__module__.startswith("torch.nn.") for kind in type(model).__mro__)


def _export_elsewhere(model: keras.Model, features_spec: Any, folder: Path) -> None:
    """Writes a SavedModel to `folder`, which must be empty. Raises `CallbackError` if the model can't be exported."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as given, held(Path(given)):
        Path(given, _MODEL).write_bytes(without_weights(model, features_spec))
        model.save_weights(Path(given, _WEIGHTS))
        command = [sys.executable, "-c", python_code(__name__), given, str(folder)]
        done = subprocess.run(command, env=environment_of_exports(), capture_output=True, text=True)
        error = Path(given, _ERROR)
        if done.returncode or error.exists():
            text = error.read_text(encoding="utf-8") if error.exists() else done.stderr[-2000:]
            raise CallbackError(
                f"The model {type(model).__name__} can't be exported as a SavedModel. With PyTorch, another process "
                f"rebuilds the model on TensorFlow, which failed: {text}\n"
                "Use only Keras operations in call(). Or don't export it, and save the model as a .keras file in "
                "on_train_end of a callback."
            )


def without_weights(model: keras.Model, features_spec: Any) -> bytes:
    """A built model without weights, and `features_spec`, for `carry.loads` in a process with Keras on TensorFlow."""
    with _only_layers(model):
        content = {"model": model, "features_spec": features_spec}
        return carry.dumps(content, content, hollow=Hollow(model.weights, portable=True))


def environment_of_exports() -> dict[str, str]:
    """The environment of such a process."""
    environment = os.environ | {"KERAS_BACKEND": "tensorflow"}
    hide_gpus(environment)  # it computes next to nothing
    return environment


@contextlib.contextmanager
def _only_layers(model: keras.Model) -> Iterator[None]:
    """Uncompiles the model meanwhile: a job's optimizers and metrics refer to objects of this process."""
    attributes = vars(model)
    before = {name: attributes.pop(name) for name in _OF_TRAINING if name in attributes}
    attributes["compiled"] = False
    try:
        yield
    finally:
        attributes.update(before)


def main() -> int:
    """The entry point of the other process."""
    from elasticcb.callbacks.serving_signature import add_serving_endpoint

    show_as("export")
    given = Path(sys.argv[1])
    try:
        content = carry.loads((given / _MODEL).read_bytes())
        model = content["model"]
        model.load_weights(given / _WEIGHTS)
        archive = keras.export.ExportArchive()
        add_serving_endpoint(archive, model, content["features_spec"])
        archive.write_out(sys.argv[2], verbose=False)
    except Exception as error:
        (given / _ERROR).write_text(describe(error), encoding="utf-8")
    return 0
