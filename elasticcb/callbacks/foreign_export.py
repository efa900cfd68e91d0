"""Exports a PyTorch model as a SavedModel: another process rebuilds the model with Keras on TensorFlow, and exports
it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from elasticcb.errors import CallbackError, describe
from elasticcb.process.devices import hide_gpus
from elasticcb.process.import_path import python_code
from elasticcb.serialization import carry

# Attributes that `compile` and a job set on a model.
_OF_TRAINING = (
    "compiled", "loss", "optimizer", "compute_loss", "compute_metrics", "train_step", "test_step",
    "_compile_config", "_compile_metrics", "_compile_loss", "_loss_tracker",
)  # fmt: skip
_MODEL, _WEIGHTS, _ERROR = "model", "model.weights.h5", "error"


def needs_another_process(model: keras.Model) -> bool:
    """Whether Keras can't export it here."""
    return any(kind.__module__.startswith("torch.nn.") for kind in type(model).__mro__)


def export_elsewhere(model: keras.Model, features_spec: Any, folder: Path) -> None:
    """Writes a SavedModel to `folder`, which must not exist.

    Args:
        features_spec: see `add_serving_endpoint`.

    Raises:
        CallbackError: the model can't be exported.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as given:
        with _only_layers(model):
            content = {"model": model, "features_spec": features_spec, "folder": folder}
            hollow = carry.Hollow(model.weights, portable=True)
            Path(given, _MODEL).write_bytes(carry.dumps(content, content, hollow=hollow))
        model.save_weights(Path(given, _WEIGHTS))
        environment = os.environ | {"KERAS_BACKEND": "tensorflow"}
        hide_gpus(environment)  # it computes next to nothing
        done = subprocess.run(
            [sys.executable, "-c", python_code(__name__), given], env=environment, capture_output=True, text=True
        )
        error = Path(given, _ERROR)
        if done.returncode or error.exists():
            text = error.read_text(encoding="utf-8") if error.exists() else done.stderr[-2000:]
            raise CallbackError(
                f"The model {type(model).__name__} can't be exported as a SavedModel. With PyTorch, another process "
                f"rebuilds the model on TensorFlow, which failed: {text}\n"
                "Use only Keras operations in call(). Or don't export it, and save the model as a .keras file in "
                "on_train_end of a callback."
            )


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

    given = Path(sys.argv[1])
    try:
        content = carry.loads((given / _MODEL).read_bytes())
        model = content["model"]
        model.load_weights(given / _WEIGHTS)
        archive = keras.export.ExportArchive()
        add_serving_endpoint(archive, model, content["features_spec"])
        archive.write_out(str(content["folder"]), verbose=False)
    except Exception as error:
        (given / _ERROR).write_text(describe(error), encoding="utf-8")
    return 0
