"""The arguments of `Cluster`, `fit`, `evaluate` and `predict`, checked."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import warnings
from dataclasses import dataclass
from typing import Any

import keras

from elasticcb.api.job_folder import JobFolder
from elasticcb.cluster.ray import check_ray
from elasticcb.errors import UsageError
from elasticcb.security.certificates import check_installed
from elasticcb.security.tls import FILES, TLS, tls_files
from elasticcb.settings import (
    CallbackErrors,
    CheckpointSettings,
    ClusterKind,
    ClusterSettings,
    EmbeddingSettings,
    NonFinite,
    TrainingSettings,
    WhenFull,
    WireDtype,
    conflicts_with_replicas,
)
from elasticcb.storage.remote_files import is_url

_LIMITS: dict[str, tuple[int, int | None]] = {  # lowest and highest value of whole numbers
    "num_workers": (1, None),
    "num_ps": (1, None),
    "ps_replicas": (0, 1),
    "grads_to_wait": (1, None),
    "sync_version_tolerance": (0, None),
    "get_model_steps": (1, None),
    "max_staleness": (0, None),
    "embedding_threshold_bytes": (0, None),
    "embedding_memory_bytes": (0, None),
    "embedding_min_count": (1, None),
    "embedding_max_age": (0, None),
    "checkpoint_steps": (0, None),
    "max_worker_restarts": (0, None),
    "max_ps_restarts": (0, None),
    "port": (0, 65535),
    "metrics_port": (0, 65535),
}
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_NAMES: dict[str, Any] = {
    "kind": ClusterKind,
    "non_finite": NonFinite,
    "callback_errors": CallbackErrors,
    "wire_dtype": WireDtype,
    "embedding_when_full": WhenFull,
}


@dataclass(frozen=True)
class ClusterArguments:
    """What `Cluster` was given, as settings."""

    cluster: ClusterSettings
    training: TrainingSettings  # the part of it that holds for all calls
    embedding: EmbeddingSettings
    checkpoint: CheckpointSettings
    log_level: str


def cluster_arguments(**given: Any) -> ClusterArguments:
    """The arguments of `Cluster` except `directory`, by name. Raises `UsageError` for one that can't be."""
    values = {name: _checked(name, value) for name, value in given.items()}
    _check_ages(values)
    _check_ray(values)
    _check_tls(values)
    lease = values["lease_seconds"]
    if values["silence_seconds"] is None:
        values["silence_seconds"] = min(ClusterSettings.silence_seconds, lease)
    silence = values["silence_seconds"]
    if silence > lease:  # while a server that hangs is missed, workers make no progress
        raise UsageError(
            "`silence_seconds` must be at most `lease_seconds`, the time that a worker may take without progress. "
            f"Received: silence_seconds={silence:g}, lease_seconds={lease:g}"
        )
    if values["ps_replicas"]:
        for name, why in conflicts_with_replicas(values):
            raise UsageError(f"`ps_replicas=1` can't be with `{name}={given[name]!r}`: {why}")

    def take(*names: str) -> dict[str, Any]:
        return {name: values[name] for name in names}

    folder = values["checkpoint_dir"]
    if is_url(os.fspath(folder)):
        raise UsageError(
            f"checkpoint_dir={folder!r} is a URL. Expected a folder of this machine: a Cluster can't write to remote "
            "ones. `elasticcb train --checkpoint_dir` can; here, copy the folder after `fit`."
        )
    return ClusterArguments(
        ClusterSettings(
            **take("kind", "ray_address", "num_workers", "num_ps", "ps_replicas", "host", "port", "metrics_port"),
            **take("max_worker_restarts", "max_ps_restarts", "silence_seconds", "tls", *FILES, "tls_name"),
        ),
        TrainingSettings(
            **take("use_async", "grads_to_wait", "sync_version_tolerance", "get_model_steps", "max_staleness"),
            **take("wire_dtype", "non_finite", "callback_errors", "lease_seconds"),
        ),
        EmbeddingSettings(
            **{field.name: values[f"embedding_{field.name}"] for field in dataclasses.fields(EmbeddingSettings)}
        ),
        CheckpointSettings(
            directory=os.path.abspath(folder) if folder else "",
            steps=values["checkpoint_steps"],
            interval_seconds=values["checkpoint_interval"],
        ),
        values["log_level"],
    )


def job_folder(job_dir: str | os.PathLike[str] | None, checkpoint_interval: float) -> JobFolder | None:
    """The folder of `job_dir`, if there is to be one. Raises `UsageError` when it could not be used."""
    if job_dir is None:
        return None
    if not os.fspath(job_dir):
        raise UsageError("`job_dir` must name a folder, or be None. Received: job_dir=''")
    if not checkpoint_interval:
        raise UsageError(
            f"job_dir={os.fspath(job_dir)!r} keeps what servers write down every `checkpoint_interval` seconds, and "
            "checkpoint_interval=0 was given, which writes nothing. Leave out one of them."
        )
    return JobFolder(job_dir)


def _checked(name: str, value: Any) -> Any:
    if name == "metrics_port" and value is None:
        return None
    if name in _LIMITS:
        return _whole(name, value, *_LIMITS[name])
    if name in _NAMES:
        try:
            return _NAMES[name](value)
        except ValueError:
            known = ", ".join(repr(member.value) for member in _NAMES[name])
            raise UsageError(f"`{name}` must be one of {known}. Received: {name}={value!r}") from None
    if name == "checkpoint_interval":
        return _seconds(name, value)
    if name == "silence_seconds" and value is None:
        return None
    if name in ("lease_seconds", "silence_seconds"):
        return _above_zero(name, value)
    if name in ("use_async", "tls") and not isinstance(value, bool):
        raise UsageError(f"`{name}` must be True or False. Received: {name}={value!r}")
    if name in FILES:
        return os.path.abspath(value) if value else ""
    if name == "log_level" and value not in _LOG_LEVELS:
        raise UsageError(f"`log_level` must be one of {', '.join(_LOG_LEVELS)}. Received: log_level={value!r}")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UsageError(f"`{name}` must be a number of seconds of at least 0. Received: {name}={value!r}")
    return float(value)


def _above_zero(name: str, value: Any) -> float:
    seconds = _seconds(name, value)
    if not seconds:
        raise UsageError(f"`{name}` must be more than 0. Received: {name}={value!r}")
    return seconds


def _whole(name: str, value: Any, lowest: int, highest: int | None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = lowest - 1
    if number < lowest or (highest is not None and number > highest):
        limits = f"of at least {lowest}" if highest is None else f"between {lowest} and {highest}"
        raise UsageError(f"`{name}` must be a whole number {limits}. Received: {name}={value!r}")
    return number


def _check_ages(values: dict[str, Any]) -> None:
    if not values["use_async"] and values["max_staleness"]:
        raise UsageError(
            f"max_staleness={values['max_staleness']} has a meaning in asynchronous mode only, and use_async=False was "
            "given. Leave out one of them; sync_version_tolerance says how old gradients may be in synchronous mode."
        )
    age = (values["get_model_steps"] - 1) // values["grads_to_wait"]
    if not values["use_async"] and age > values["sync_version_tolerance"]:
        raise UsageError(
            f"get_model_steps={values['get_model_steps']} makes weights {age} versions old, and "
            f"sync_version_tolerance={values['sync_version_tolerance']} refuses gradients of such weights. Lower "
            "get_model_steps, or raise sync_version_tolerance."
        )


def _check_ray(values: dict[str, Any]) -> None:
    if values["kind"] is ClusterKind.RAY:
        check_ray(values["ray_address"])
    elif values["ray_address"]:
        raise UsageError(
            f"ray_address={values['ray_address']!r} has a meaning with kind='ray' only. Give both, or leave it out."
        )


def _check_tls(values: dict[str, Any]) -> None:
    files = tls_files(values)
    if files is not None:
        TLS.load(files)
    elif values["tls"]:
        check_installed()


def frequency(validation_freq: Any) -> int | tuple[int, ...]:
    """`validation_freq`, checked as Keras checks it."""
    if isinstance(validation_freq, (list, tuple, set)):
        return tuple(validation_freq)
    if not isinstance(validation_freq, int):
        raise ValueError(
            "Expected `validation_freq` to be a list or int. "
            f"Received: validation_freq={validation_freq} of the type {type(validation_freq)}."
        )
    if validation_freq < 1:
        raise ValueError(f"`validation_freq` must be at least 1. Received: validation_freq={validation_freq}")
    return validation_freq


def capped_epochs(epochs: int) -> int:
    """`epochs` under `keras.config.max_epochs()`, with Keras's warning."""
    limit = keras.config.max_epochs()
    if limit and limit < epochs:
        warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
        return int(limit)
    return epochs


def with_keras_callbacks(
    callbacks: Any, verbose: int | str, history: bool = True
) -> tuple[keras.callbacks.History, list[keras.callbacks.Callback]]:
    """The user's callbacks, and those that Keras adds."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    listed = [callback for callback in keras.tree.flatten(callbacks) if callback is not None]
    for callback in listed:
        if not isinstance(callback, keras.callbacks.Callback):
            hint = f" Call the class: {callback.__name__}()." if isinstance(callback, type) else ""
            raise TypeError(
                "`callbacks` must be a list of keras.callbacks.Callback objects. "
                f"Received: {callback!r} (of type {type(callback)}).{hint}"
            )
    found = next((callback for callback in listed if isinstance(callback, keras.callbacks.History)), None)
    if verbose != 0 and not any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in listed):
        listed.append(keras.callbacks.ProgbarLogger())
    if found is None:
        found = keras.callbacks.History()
        found.epoch = []  # as it is after an epoch that there was not
        if history:
            listed.append(found)
    return found, listed
