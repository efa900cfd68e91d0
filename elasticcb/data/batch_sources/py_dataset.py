"""Batches of a `keras.utils.PyDataset`, of which each worker has a copy."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batches import PassSource, Purpose, source_seed
from elasticcb.serialization.carry import Copies

_HOOKS = ("on_epoch_begin", "on_epoch_end")


class PyDatasetSource(PassSource):
    """Batches of a `PyDataset`, by its own index.

    Each process reads its own copy, in which a model that the dataset reads is the process's own. Hooks are called as
    Keras calls them, in every process that reads an epoch: `on_epoch_begin` and `on_epoch_end` of each epoch, and one
    `on_epoch_end` before those of a `fit` or `evaluate`. Meanwhile, Python's and NumPy's random states are seeded by
    the epoch, so that all copies agree.

    Args:
      dataset: an endless dataset (`num_batches` is None) needs `steps`, and its index keeps counting.
      shuffle: read the batches in a different order in each pass.
      steps: see `PassSource`.
      limit: maximum number of batches in a pass.
      purpose: as in `adapt`; each validation is a call of `evaluate`.
    """

    def __init__(
        self,
        dataset: keras.utils.PyDataset,
        *,
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool = False,
        steps: int | None = None,
        limit: int | None = None,
        purpose: Purpose = "fit",
        seed: int,
    ) -> None:
        size = dataset.num_batches
        self._endless = size is None
        if size is None:
            size = limit or steps
        if not size:
            raise ValueError("The PyDataset has length 0")
        super().__init__(min(size, limit or size), steps)
        self._class_weight = class_weight
        self._shuffle = shuffle and not self._endless
        self._purpose = purpose
        self._seed = seed
        # If a task of an earlier epoch is retried, a fresh copy is needed.
        self._stateful = has_hooks(dataset)
        self.given = dataset
        self._copies: Copies | None = None
        self._adapter: Any = None
        self._epoch = -1  # the epoch of the copy

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_adapter": None, "_copies": None, "_epoch": -1}

    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        self._enter(epoch)
        indices: Sequence[int] = range(start, end)
        if self._endless:
            first = number * self.size if self.steps else 0
            indices = range(first + start, first + end)
        elif self._shuffle:
            generator = np.random.Generator(np.random.PCG64(source_seed(self._seed, number)))
            indices = generator.permutation(self.size)[start:end].tolist()
        dataset = self._adapter.py_dataset
        for batch in _read_ahead(dataset.__getitem__, indices, dataset.workers, dataset.max_queue_size):
            yield keras_data.to_batch(keras_data.standardized(self._adapter, batch))

    def close(self) -> None:
        self._adapter, self._epoch = None, -1

    def _enter(self, epoch: int) -> None:
        if self._adapter is None or (self._stateful and epoch < self._epoch):
            dataset = self.given
            if self._stateful:
                self._copies = self._copies or Copies(dataset, type(dataset).__name__)
                dataset = self._copies.new()
            self._adapter = keras_data.PyDatasetAdapter(dataset, self._class_weight)
            self._epoch = -1
        while self._stateful and self._epoch < epoch:
            if self._epoch >= 0:
                self._leave(self._adapter.py_dataset, self._epoch)
            self._epoch += 1
            if self._purpose in ("validation", "evaluate") or (self._purpose == "fit" and self._epoch == 0):
                self._call(self._adapter.py_dataset.on_epoch_end, self._epoch, 0)
            self._call(self._adapter.py_dataset.on_epoch_begin, self._epoch, 1)

    def was_read(self, passes: int) -> None:
        if self._stateful and passes:
            self._adapter, self._epoch = keras_data.PyDatasetAdapter(self.given, self._class_weight), -1
            self._enter(passes - 1)
            self._leave(self.given, passes - 1)
            self.close()

    def follow(self) -> None:
        if self._stateful:  # its copy has others; a new one has them, and gets the hooks of all epochs so far
            self._adapter, self._copies, self._epoch = None, None, -1

    def _leave(self, dataset: keras.utils.PyDataset, epoch: int) -> None:
        self._call(dataset.on_epoch_end, epoch, 2)

    def _call(self, hook: Callable[[], None], epoch: int, place: int) -> None:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        words = np.random.SeedSequence(source_seed(self._seed, epoch, place)).generate_state(4)
        random.seed(words.tobytes())
        np.random.seed(words)
        try:
            hook()
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def has_hooks(dataset: Any) -> bool:
    """Whether it is a `PyDataset` that its hooks may change."""
    is_own = any(getattr(type(dataset), hook, None) is not getattr(keras.utils.PyDataset, hook) for hook in _HOOKS)
    return isinstance(dataset, keras.utils.PyDataset) and is_own


def _read_ahead(read: Callable[[int], Any], indices: Sequence[int], threads: int, most: int) -> Iterator[Any]:
    """Yields `read(index)` for each index, in order; with several threads, `most` at once."""
    if threads <= 1:
        yield from map(read, indices)
        return
    remaining = iter(indices)
    with ThreadPoolExecutor(threads) as pool:
        reading: deque[Future[Any]] = deque(pool.submit(read, i) for i in itertools.islice(remaining, max(most, 1)))
        try:
            while reading:
                yield reading.popleft().result()
                reading.extend(pool.submit(read, i) for i in itertools.islice(remaining, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
