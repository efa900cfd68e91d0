"""Batches of a dataset that each worker creates for itself."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batches import BatchSource


class DatasetFactory:
    """A function that creates a `tf.data.Dataset` of batches, as data for `fit`; each worker calls it once.

    Args:
      dataset_fn: function with no argument or one, a `tf.distribute.InputContext`.

    Raises `TypeError` if it is not callable.
    """

    def __init__(self, dataset_fn: Callable[..., tf.data.Dataset]) -> None:
        if not callable(dataset_fn):
            raise TypeError(f"`dataset_fn` for `DatasetFactory` must be a `callable`. Received: {dataset_fn}")
        self.dataset_fn = dataset_fn

    def __call__(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The dataset. Raises `TypeError` if the function returns something else."""
        try:
            parameters = inspect.signature(self.dataset_fn).parameters.values()
        except (TypeError, ValueError):  # some functions written in C have no signature
            parameters = {}.values()
        needed = [
            p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        dataset = self.dataset_fn(context) if needed else self.dataset_fn()
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"The `callable` provided to `DatasetFactory` must return a tf.data.Dataset. It returns "
                f"{dataset} of type {type(dataset).__name__}"
            )
        return dataset


class DatasetFnSource(BatchSource):
    """Steps: each is the next batch of the dataset of the worker that takes it; batch numbers only count.

    A worker's iterator continues across ranges and epochs, and restarts when the dataset ends.

    Args:
      steps: batches in an epoch.
      class_weight: as in `fit`.
    """

    repeatable = False

    def __init__(self, factory: DatasetFactory, steps: int, class_weight: Mapping[int, float] | None) -> None:
        self.num_batches = steps
        self.given = factory
        self._class_weight = class_weight
        self._dataset: tf.data.Dataset | None = None
        self._iterator: Iterator[Any] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None, "_iterator": iter(())}

    def batches(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        for _ in range(start, min(end, self.num_batches or end)):
            yield self._next()

    def first_batch(self) -> Any:
        batch = self._next()
        self._iterator = itertools.chain([batch], self._iterator)
        return batch

    def close(self) -> None:
        self._dataset, self._iterator = None, iter(())

    def _next(self) -> Any:
        if self._dataset is None:
            # The number of workers may change at any time, so each worker sees the whole data.
            self._dataset = keras_data.weighted(self.given(tf.distribute.InputContext()), self._class_weight)
            self.fixed = keras_data.fixed_rows(self._dataset)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = iter(self._dataset)
            batch = next(self._iterator, None)
            if batch is None:
                raise ValueError("The dataset that `dataset_fn` returned is empty. Expected at least one batch.")
        return keras_data.to_batch(batch)
