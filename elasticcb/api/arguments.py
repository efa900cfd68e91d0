"""Checks the arguments of `Cluster`, `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import difflib
import operator
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from elasticcb.cluster.registry import backend_of, backends, contradictions, missing_for
from elasticcb.data.batch_sources.py_dataset import has_hooks
from elasticcb.errors import UsageError
from elasticcb.keras_private import check_compiled
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.settings import Given, JobSettings
from elasticcb.settings.checks import completed, in_words, problems_of
from elasticcb.settings.given import place_of
from elasticcb.storage.remote_files import is_url, problem_of, without_password


def cluster_settings(
    given: Mapping[str, Any], others: Mapping[str, Any], job_dir: str | os.PathLike[str] | None
) -> JobSettings:
    """The arguments of a `Cluster`, as settings for all its calls.

    Raises:
        TypeError: one of `others` never existed.
        UsageError: the message lists all problems.
    """
    moved = {name: place_of(name, value) for name, value in others.items()}
    check_keywords("Cluster.__init__", [name for name, place in moved.items() if not place], given)
    read = Given.by_arguments(given)
    settings = read.settings()
    problems = [*moved.values(), *problems_of(settings, read), *contradictions(settings, read)]
    problems += [*missing_for(settings.cluster), *_unsupported(settings)]
    problems += _job_dir(settings, job_dir)
    for name, place in (("job_dir", os.fspath(job_dir or "")), ("checkpoint_dir", settings.checkpoint.directory)):
        if is_url(place) and (problem := problem_of(place)):
            problems.append(f"{name}={without_password(place)!r} {problem}")
    if problems:
        raise UsageError(in_words("Cluster", problems))
    return completed(settings, read)


def check_keywords(method: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises Python's `TypeError` for a keyword argument that `method` does not have, and suggests a similar one."""
    names = list(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            meant = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{meant}")


def _unsupported(settings: JobSettings) -> Iterator[str]:
    kind = settings.cluster.kind
    if kind in backends() and not backend_of(kind).in_programs:
        yield f"kind={kind!r} is available only on the command line. Run `elasticcb train --cluster={kind}`."


def _job_dir(settings: JobSettings, job_dir: str | os.PathLike[str] | None) -> Iterator[str]:
    if job_dir is None:
        return
    if not os.fspath(job_dir):
        yield "job_dir='' is invalid. Expected a folder or a URL, or None."
    elif not settings.checkpoint.interval_seconds:
        yield (
            f"job_dir={os.fspath(job_dir)!r} needs recovery files of the servers, but "
            "CheckpointOptions(interval_seconds=0) disables them. Remove one of the two."
        )


def frequency(validation_freq: Any) -> int | tuple[int, ...]:
    """Checks `validation_freq` as Keras does."""
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


def check_model(model: Any, method: str, compiled: bool = True) -> None:
    """Raises `UsageError` if it is not a Keras model, and Keras's `ValueError` if it must be `compiled` and is not."""
    if not isinstance(model, keras.Model):
        kind = f"{type(model).__module__}.{type(model).__qualname__}".removeprefix("builtins.")
        raise UsageError(
            f"Cluster.{method} takes a keras.Model as its first argument. Received an object of the class {kind}."
        )
    if compiled:
        check_compiled(model, method)
    kinds = {"fit": ("train", "test"), "evaluate": ("test",), "predict": ("predict",)}[method]
    for kind in kinds:
        if is_overridden(model, f"make_{kind}_function"):
            raise UsageError(
                f"{type(model).__name__} overrides make_{kind}_function, which Keras's {method} compiles; workers call "
                f"the model's {kind}_step themselves. Override {kind}_step instead."
            )


def check_numbers(**numbers: Any) -> None:
    """Checks sizes and numbers of steps, by name. Keras takes some others, and trains on other batches, or on none.

    Raises:
        TypeError: one is not an integer.
        ValueError: one is negative.
    """
    for name, value in numbers.items():
        if value is None:
            continue
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}") from None
        if number < 0:
            raise ValueError(f"`{name}` must not be negative. Received: {name}={value!r}")


def check_split(validation_split: float) -> None:
    """Raises `ValueError` where Keras would train or validate on no data."""
    if isinstance(validation_split, (int, float)) and not 0 <= validation_split <= 1:
        raise ValueError(f"`validation_split` must be between 0 and 1. Received: validation_split={validation_split!r}")


def check_apart(x: Any, validation_data: Any) -> None:
    """Raises `UsageError` for one PyDataset with hooks, as data to train and to validate on."""
    if validation_data is not None and validation_data is x and has_hooks(x):
        raise UsageError(
            f"x and validation_data are the same {type(x).__name__}, which its on_epoch_begin or on_epoch_end may "
            "change: training and validation read copies of their own, so their hooks would not see each other. "
            "Create one object for each."
        )


def epoch_range(epochs: Any, initial_epoch: Any) -> tuple[int, dict[str, int]]:
    """Checks both arguments, and limits `epochs` to `keras.config.max_epochs()`, with Keras's warning.

    Returns:
        The number of epochs, and the resulting settings of the job.
    """
    epochs, initial_epoch = operator.index(epochs), operator.index(initial_epoch)
    if initial_epoch < 0:
        raise ValueError(f"`initial_epoch` must be at least 0. Received: initial_epoch={initial_epoch}")
    limit = keras.config.max_epochs()
    if limit and limit < epochs:
        warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
        epochs = int(limit)
    last = max(epochs, 1)
    return epochs, {"num_epochs": last, "initial_epoch": initial_epoch if epochs > initial_epoch else last}


def with_keras_callbacks(
    callbacks: Any, verbose: int | str, history: bool = True
) -> tuple[keras.callbacks.History, list[keras.callbacks.Callback]]:
    """The user's callbacks, and the ones that Keras adds."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    listed = [callback for callback in keras.tree.flatten(callbacks) if callback is not None]
    for callback in listed:
        if not isinstance(callback, keras.callbacks.Callback):
            hint = f" Create an instance: {callback.__name__}()." if isinstance(callback, type) else ""
            raise TypeError(
                "`callbacks` must be a list of keras.callbacks.Callback objects. "
                f"Received: {callback!r} (of type {type(callback)}).{hint}"
            )
    found = next((callback for callback in listed if isinstance(callback, keras.callbacks.History)), None)
    if verbose != 0 and not any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in listed):
        listed.append(keras.callbacks.ProgbarLogger())
    if found is None:
        found = keras.callbacks.History()
        found.epoch = []  # as after an epoch that did not take place
        if history:
            listed.append(found)
    return found, listed


class ShowsModel(keras.callbacks.Callback):
    """With it, the caller's model has the trained weights when an epoch begins: data may read it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Hooks on the master see the current weights; nothing else is to be done."""
