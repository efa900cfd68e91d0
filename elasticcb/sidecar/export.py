"""Exports the model of a job from a checkpoint, or from the recovery files of a job that runs or was stopped."""

from __future__ import annotations

import secrets
from pathlib import Path

import keras

from elasticcb.callbacks import SavedModelExporter
from elasticcb.checkpoint.versions import find_latest
from elasticcb.compute.registry import backend
from elasticcb.errors import CheckpointError
from elasticcb.model.input_pipeline import open_pipeline
from elasticcb.model.model_file import ModelSpec
from elasticcb.serving.loading import ForeignCheckpointError, load_version
from elasticcb.settings import JobSettings, Mode
from elasticcb.storage.local_folders import next_numbered

_TRIES = 5  # while servers replace the recovery files


def export_model(settings: JobSettings, snapshot: Path, output: Path, numbered: bool) -> tuple[int, Path]:
    """Builds the model of a training job as the job does, with the first batch of its data, and exports it.

    Returns the version of the weights, which may be newer than the snapshot was before the call, and what was written.

    Args:
        snapshot: folder of one version, of recovery files, or of versions, of which the newest at that time is loaded.
        output: folder for a SavedModel, or a file that ends in `.keras`.
        numbered: `output` is a folder, and the SavedModel is the next number below it when it is finished.

    Raises:
        ModelFileError, DataError: the model can't be built.
        CheckpointError: the snapshot can't be read, or belongs to another model.
        CallbackError: the model can't be exported.
    """
    spec = ModelSpec(settings.model)
    model = spec.build_model()
    pipeline = open_pipeline(settings, spec, Mode.TRAINING)
    backend().build(spec, model, pipeline.first_batch(), Mode.TRAINING)
    version = _load(model, snapshot)
    if output.suffix == ".keras":
        _save(model, output)
        return version, output
    element = pipeline.element_spec
    exporter = SavedModelExporter(next_numbered(output) if numbered else output)
    exporter.set_model(model)
    exporter.set_params({"features_spec": element[0] if isinstance(element, tuple) else element})
    exporter.on_train_begin()
    return version, exporter.export(numbered)


def _load(model: keras.Model, snapshot: Path) -> int:
    for _ in range(_TRIES - 1):
        try:
            return load_version(model, str(find_latest(snapshot)))
        except ForeignCheckpointError:
            raise
        except CheckpointError:
            continue
    return load_version(model, str(find_latest(snapshot)))


def _save(model: keras.Model, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = output.with_name(f".{secrets.token_hex(4)}-{output.name}")
    try:
        model.save(fresh)
        fresh.replace(output)
    finally:
        fresh.unlink(missing_ok=True)
