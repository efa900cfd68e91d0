"""Transfers the data of one call to the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from elasticcb.api.job_folder import KeptFit
from elasticcb.data.batch_sources.adapt import adapt
from elasticcb.data.batch_sources.py_dataset import has_hooks
from elasticcb.data.batch_sources.service import DataService
from elasticcb.data.batches import BatchSource
from elasticcb.errors import UsageError
from elasticcb.settings import Mode


class MethodCall:
    """One `fit`, `evaluate` or `predict`.

    Args:
        service: serves the batches of data without an index.
        seed: seed for shuffling the data; None draws one.

    Attributes:
        fit: stored state of this fit, for a program with `job_dir`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        service: DataService,
        seed: int | None = None,
        fit: KeptFit | None = None,
    ) -> None:
        self.fit = fit
        self.name = name
        self.folder = folder
        self._service = service
        # From TensorFlow, as Keras does for shuffling: a draw from Python's generator would change a model's initial
        # weights.
        drawn = int(tf.random.uniform((), maxval=tf.int32.max, dtype=tf.int32))
        self.seed = drawn if seed is None else seed
        self._sources: list[BatchSource] = []

    def adapt(self, x: Any, y: Any = None, sample_weight: Any = None, *, purpose: Any, **options: Any) -> BatchSource:
        """The batches of `x`, `y` and `sample_weight`, as Keras would create them."""
        folder = self.folder / purpose
        folder.mkdir()
        source = adapt(
            x, y, sample_weight, purpose=purpose, folder=folder, seed=self.seed, service=self._service, **options
        )
        self._sources.append(source)
        if source.num_batches is not None and source.num_batches < 1:
            use = " to validate on" if purpose == "validation" else ""
            raise ValueError(
                f"`{self.name}` needs at least one batch of data{use}. Received: "
                f"batch_size={options.get('batch_size')}, and data that gives {source.num_batches} batches."
            )
        return source

    def was_read(self, *passes: int) -> None:
        """How many passes read each of the data, in the order of `adapt`."""
        for source, times in zip(self._sources, passes, strict=False):
            source.was_read(times)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def training_sources(
    call: MethodCall,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    shuffle: bool | str,
    class_weight: Any,
    steps_per_epoch: int | None,
    initial_epoch: int,
    validation_data: Any,
    validation_batch_size: int | None,
    validation_steps: int | None,
) -> dict[str, BatchSource]:
    """The data passed to `fit`, by mode; arguments have the same meaning as for `keras.Model.fit`."""
    sources: dict[str, BatchSource] = {
        Mode.TRAINING: call.adapt(
            x,
            y,
            sample_weight,
            purpose="fit",
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            steps=steps_per_epoch,
        )
    }
    sources[Mode.TRAINING].first_epoch = initial_epoch
    if validation_data is not None:
        if validation_data is x and has_hooks(x):
            raise UsageError(
                f"x and validation_data are the same {type(x).__name__}, which its on_epoch_begin or on_epoch_end may "
                "change: training and validation read copies of their own, so their hooks would not see each other. "
                "Create one object for each."
            )
        sources[Mode.EVALUATION] = call.adapt(
            *keras.utils.unpack_x_y_sample_weight(validation_data),
            purpose="validation",
            batch_size=validation_batch_size or batch_size,
            steps=validation_steps,
        )
    return sources
