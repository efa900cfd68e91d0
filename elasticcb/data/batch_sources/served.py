"""Batches of a `tf.data.Dataset` or a generator, handed out by tf.data's service."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.encoding import Layout
from elasticcb.data.batch_sources.service import DataService, served_batches
from elasticcb.data.batches import BatchSource
from elasticcb.errors import DataError


class ServedSource(BatchSource):
    """Batches that are iterated over in the process that calls `fit`, each for the one worker that asks next.

    Visitation: each batch of a pass goes to one worker, so it is seen at most once; exactly once when no worker dies.
    The batches that a worker held when it died are not handed out again: the epoch is that much shorter, or, with
    `steps`, goes further into the data. Which numbers of batches belong to which range is only settled when they are
    asked for.

    The copy that was not pickled shows the first batch alone, and takes none from the workers.

    Args:
      batches: an iterable, iterated over once for each pass.
      size: batches in a pass, where it is known.
      steps: batches in an epoch, for epochs that go on where the one before ended. None: an epoch is a pass.

    Raises `ValueError` when there is no batch.
    """

    ends_early = True
    repeatable = False

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        size: int | None,
        steps: int | None,
        service: DataService,
    ) -> None:
        self.num_batches = steps or size
        first_pass = iter(batches)
        first = next(first_pass, None)
        if first is None:
            raise ValueError(f"The {type(batches).__name__} must yield at least one batch. Received an empty one.")
        first_batch = keras_data.to_batch(first)
        self._layout = Layout(first_batch)
        self._first = self._layout.arrays(first_batch)
        self._service: DataService | None = service  # in the process that serves; that copy draws nothing
        # What was looked at belongs to the first pass; a generator could not give it again.
        passes = itertools.chain([itertools.chain([first], first_pass)], map(iter, itertools.repeat(batches)))
        self._served = service.register(passes, self._layout, by_epoch=steps is None)
        self._dataset: tuple[tuple[int, int], tf.data.Dataset] | None = None  # of ranges of one epoch and length

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_service": None, "_dataset": None}

    def batches(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        if self.num_batches is not None:
            end = min(end, self.num_batches)
        if self._service is not None:
            yield from [self.first_batch()][start:end]
            return
        if start >= end:
            return
        if self._dataset is None or self._dataset[0] != (epoch, end - start):
            self._dataset = (epoch, end - start), served_batches(self._served, epoch, end - start)
        try:
            for there_is_one, error, *arrays in self._dataset[1]:
                if error:
                    raise DataError(f"The data that `fit` was given raised {error.numpy().decode()}")
                if not there_is_one:
                    return
                yield self._layout.batch([array.numpy() for array in arrays])
        except tf.errors.OpError as error:
            raise DataError(
                f"Batches [{start}, {end}) of epoch {epoch} could not be had from the process that called `fit`: "
                f"{error.message}"
            ) from error

    def first_batch(self) -> Any:
        return self._layout.batch(self._first)

    def close(self) -> None:
        self._dataset = None
        if self._service is not None:
            self._service.release(self._served)
