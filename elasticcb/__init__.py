"""ElasticCB: elastic parameter-server training for Keras 3, driven by callbacks.

Names of the Python API, and with them Keras, are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticcb.api.cluster import Cluster, evaluate, fit, predict
    from elasticcb.api.remote import PerWorkerDataset, RemoteValue
    from elasticcb.api.restartable import handle_restartable_error
    from elasticcb.data.batch_sources.dataset_fn import DatasetFactory
    from elasticcb.errors import (
        CallbackError,
        CheckpointError,
        ClusterLostError,
        ConnectionLostError,
        DataChangedError,
        DataError,
        ElasticCBError,
        FunctionError,
        HandlerError,
        JobFailedError,
        JobInterrupted,
        ModelFileError,
        NonFiniteError,
        UsageError,
    )
    from elasticcb.serving.served_model import ServedModel
    from elasticcb.settings import (
        CheckpointOptions,
        EmbeddingOptions,
        ExchangeOptions,
        Mode,
        NetworkOptions,
        RecoveryOptions,
    )
    from elasticcb.sidecar import SidecarEvaluator

__version__ = "0.1.0"

__all__ = [
    "CallbackError",
    "CheckpointError",
    "CheckpointOptions",
    "Cluster",
    "ClusterLostError",
    "ConnectionLostError",
    "DataChangedError",
    "DataError",
    "DatasetFactory",
    "ElasticCBError",
    "EmbeddingOptions",
    "ExchangeOptions",
    "FunctionError",
    "HandlerError",
    "JobFailedError",
    "JobInterrupted",
    "Mode",
    "ModelFileError",
    "NetworkOptions",
    "NonFiniteError",
    "PerWorkerDataset",
    "RecoveryOptions",
    "RemoteValue",
    "ServedModel",
    "SidecarEvaluator",
    "UsageError",
    "evaluate",
    "fit",
    "handle_restartable_error",
    "predict",
]

_MODULES = {
    "CallbackError": "errors",
    "CheckpointError": "errors",
    "CheckpointOptions": "settings",
    "Cluster": "api.cluster",
    "ClusterLostError": "errors",
    "ConnectionLostError": "errors",
    "DataChangedError": "errors",
    "DataError": "errors",
    "DatasetFactory": "data.batch_sources.dataset_fn",
    "ElasticCBError": "errors",
    "EmbeddingOptions": "settings",
    "ExchangeOptions": "settings",
    "FunctionError": "errors",
    "HandlerError": "errors",
    "JobFailedError": "errors",
    "JobInterrupted": "errors",
    "Mode": "settings",
    "ModelFileError": "errors",
    "NetworkOptions": "settings",
    "NonFiniteError": "errors",
    "PerWorkerDataset": "api.remote",
    "RecoveryOptions": "settings",
    "RemoteValue": "api.remote",
    "ServedModel": "serving.served_model",
    "SidecarEvaluator": "sidecar",
    "UsageError": "errors",
    "evaluate": "api.cluster",
    "fit": "api.cluster",
    "handle_restartable_error": "api.restartable",
    "predict": "api.cluster",
}


def __getattr__(name: str) -> Any:
    if name in ("data", "layers", "optimizers"):
        return import_module(f"{__name__}.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
