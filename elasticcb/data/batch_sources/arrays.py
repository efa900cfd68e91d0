"""Batches of arrays, which are written to a file once and memory-mapped by all workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.blocks import BlockReader, BlockWriter
from elasticcb.data.batch_sources.columns import Column, Rows, store
from elasticcb.data.batches import PassSource, source_seed


class ArraySource(PassSource):
    """Batches of a nested structure of arrays with the same number of rows; the last batch of a pass may be short.

    Numbers and row splits are mapped, not loaded. A `np.memmap` is not copied: workers map its own file.

    Args:
      arrays: leaves of any type that Keras accepts: NumPy arrays, tensors (dense, ragged, sparse), pandas frames and
        series, SciPy's sparse matrices; None stays None.
      shuffle: True: all rows, again for each pass; "batch": rows within each batch; False: no shuffling.
      steps: see `PassSource`.
      limit: maximum number of batches in a pass.
    """

    def __init__(
        self,
        arrays: Any,
        num_rows: int,
        batch_size: int,
        *,
        shuffle: bool | str = False,
        steps: int | None = None,
        limit: int | None = None,
        folder: Path,
        seed: int = 0,
    ) -> None:
        size = -(-num_rows // batch_size)
        super().__init__(min(size, limit or size), steps)
        self._num_rows = self.num_records = num_rows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        # As for Keras's dataset: ragged batches have no fixed size, nor do others if the last one is shorter.
        self.fixed = [
            num_rows % batch_size == 0 and array is not None and not isinstance(array, tf.RaggedTensor)
            for array in tf.nest.flatten(arrays)
        ]
        self._reader = BlockReader()
        self._order: tuple[int, Any] = (-1, None)  # order of the pass that was read last
        stored: dict[int, Column] = {}  # the same array may be features and labels
        with BlockWriter(folder) as writer:

            def store_once(array: Any) -> Column:
                if id(array) not in stored:
                    stored[id(array)] = store(array, writer)
                return stored[id(array)]

            self._columns = keras_data.map_arrays(store_once, arrays)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": (-1, None)}

    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        for index in range(start, end):
            yield self._take(self._rows(number, index))

    def close(self) -> None:
        self._reader.close()
        self._order = (-1, None)

    def _take(self, rows: Rows) -> Any:
        return keras_data.map_arrays(lambda column: column.take(rows, self._reader), self._columns)

    def _rows(self, number: int, index: int) -> Rows:
        first, end = index * self._batch_size, min((index + 1) * self._batch_size, self._num_rows)
        if not self._shuffle:
            return slice(first, end)
        if self._shuffle == "batch":
            return first + _generator(self._seed, number, index).permutation(end - first)
        if self._order[0] != number:
            order = np.arange(self._num_rows, dtype=np.int32 if self._num_rows < 1 << 31 else np.int64)
            _generator(self._seed, number).shuffle(order)
            self._order = (number, order)
        return self._order[1][first:end].astype(np.int64)


def _generator(seed: int, *numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(source_seed(seed, *numbers)))
