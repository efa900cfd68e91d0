"""The callbacks of a job: the model file's, and those required by its settings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from elasticcb.settings import Command, JobSettings

if TYPE_CHECKING:
    import keras

    from elasticcb.model.spec import Spec


def job_callbacks(spec: Spec, settings: JobSettings) -> list[keras.callbacks.Callback]:
    """Creates the callback objects of one process of the job."""
    import keras

    from elasticcb.callbacks import SavedModelExporter

    callbacks = spec.make_callbacks()
    if settings.command is not Command.TRAIN and settings.model.definition:
        # The moving averages stay in the training job; its checkpoints and exports have the averaged weights.
        callbacks = [callback for callback in callbacks if not isinstance(callback, keras.callbacks.SwapEMAWeights)]
    wants_export = settings.command is Command.TRAIN and settings.output
    if wants_export and not any(isinstance(callback, SavedModelExporter) for callback in callbacks):
        # First, so that an uploader among the others finds the model.
        callbacks.insert(0, SavedModelExporter())
    return callbacks


def callback_params(settings: JobSettings, worker_id: int = -1, steps: int | None = None) -> dict[str, Any]:
    """`callback.params`; `worker_id` is -1 on the master. Only the master knows `steps`, the batches of an epoch."""
    exported = settings.output if settings.command is Command.TRAIN else ""
    return {
        "batch_size": settings.training.minibatch_size,
        "epochs": settings.training.num_epochs,
        "steps": steps,
        "verbose": 1,
        "saved_model_path": exported or os.path.join(settings.directory, "saved_model"),
        "checkpoint_path": settings.checkpoint.directory,
        "job_directory": settings.directory,
        "worker_id": worker_id,
        **settings.callback_params,
    }
