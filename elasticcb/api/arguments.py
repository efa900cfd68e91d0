"""The arguments of `Cluster`, `fit`, `evaluate` and `predict`, checked."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from dataclasses import dataclass
from typing import Any

import keras

from elasticcb.errors import UsageError
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
)

_LIMITS: dict[str, tuple[int, int | None]] = {  # lowest and highest value of whole numbers
    "num_workers": (1, None),
    "num_ps": (1, None),
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

    def take(*names: str) -> dict[str, Any]:
        return {name: values[name] for name in names}

    folder = values["checkpoint_dir"]
    return ClusterArguments(
        ClusterSettings(
            **take("kind", "num_workers", "num_ps", "host", "port", "max_worker_restarts", "max_ps_restarts")
        ),
        TrainingSettings(
            **take("use_async", "grads_to_wait", "sync_version_tolerance", "get_model_steps", "max_staleness"),
            **take("wire_dtype", "non_finite", "callback_errors"),
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


def _checked(name: str, value: Any) -> Any:
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
    if name == "use_async" and not isinstance(value, bool):
        raise UsageError(f"`use_async` must be True or False. Received: use_async={value!r}")
    if name == "log_level" and value not in _LOG_LEVELS:
        raise UsageError(f"`log_level` must be one of {', '.join(_LOG_LEVELS)}. Received: log_level={value!r}")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UsageError(f"`{name}` must be a number of seconds of at least 0. Received: {name}={value!r}")
    return float(value)


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
        if history:
            listed.append(found)
    return found, listed
