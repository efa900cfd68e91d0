"""Callbacks: where their hooks run, and the ones that come with ElasticCB.

The names are imported when they are first used, so that `elasticcb.callbacks.placement` can be imported
without Keras and TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticcb.callbacks.batch_limit import every
    from elasticcb.callbacks.dispatch import Dispatcher
    from elasticcb.callbacks.early_stopper import EarlyStopper
    from elasticcb.callbacks.learning_rate_scheduler import LearningRateScheduler
    from elasticcb.callbacks.max_steps_stopper import MaxStepsStopper, MaxStepsStopping
    from elasticcb.callbacks.model_uploader import ModelUploader
    from elasticcb.callbacks.placement import Place, runs_on
    from elasticcb.callbacks.prediction_outputs_processor import (
        BasePredictionOutputsProcessor,
        PredictionOutputsProcessor,
    )
    from elasticcb.callbacks.saved_model_exporter import SavedModelExporter
    from elasticcb.callbacks.summary_writer import SummaryWriter

_MODULES = {
    "BasePredictionOutputsProcessor": "prediction_outputs_processor",
    "Dispatcher": "dispatch",
    "EarlyStopper": "early_stopper",
    "LearningRateScheduler": "learning_rate_scheduler",
    "MaxStepsStopper": "max_steps_stopper",
    "MaxStepsStopping": "max_steps_stopper",
    "ModelUploader": "model_uploader",
    "Place": "placement",
    "PredictionOutputsProcessor": "prediction_outputs_processor",
    "SavedModelExporter": "saved_model_exporter",
    "SummaryWriter": "summary_writer",
    "every": "batch_limit",
    "runs_on": "placement",
}

__all__ = [
    "BasePredictionOutputsProcessor",
    "Dispatcher",
    "EarlyStopper",
    "LearningRateScheduler",
    "MaxStepsStopper",
    "MaxStepsStopping",
    "ModelUploader",
    "Place",
    "PredictionOutputsProcessor",
    "SavedModelExporter",
    "SummaryWriter",
    "every",
    "runs_on",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
