"""Batches that are read once, written to a file, and then read from it by number."""

from __future__ import annotations

import itertools
import logging
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.encoding import Layout
from elasticcb.data.batches import PassSource

_LOGGER = logging.getLogger(__name__)
_LARGE_BYTES = 1 << 30


class StoredSource(PassSource):
    """All batches of an iterable, in order, each once per pass.

    They are read when the source is created, in the creating process, so any iterable works: a `tf.data.Dataset` or a
    generator. The file is not loaded into memory as a whole.

    Args:
      batches: an iterable; an endless one needs a `limit`.
      limit: maximum number of batches to read; None: all.

    Raises `ValueError` if there is no batch.
    """

    def __init__(self, batches: Iterable[Any], *, limit: int | None, folder: Path) -> None:
        offsets = [0]
        self.fixed = keras_data.fixed_rows(batches)
        with tempfile.NamedTemporaryFile(prefix="batches-", suffix=".bin", dir=folder, delete=False) as file:
            self._path = file.name
            for batch in map(keras_data.to_batch, itertools.islice(batches, limit)):
                if len(offsets) == 1:
                    self._layout = Layout(batch)
                pickle.dump(self._layout.arrays(batch), file, protocol=pickle.HIGHEST_PROTOCOL)
                offsets.append(file.tell())
                if limit is None and offsets[-1] >= _LARGE_BYTES > offsets[-2]:
                    _LOGGER.warning(
                        "Wrote %d batches of %s to %s so far. If the data is endless, pass the number of steps.",
                        len(offsets) - 1,
                        type(batches).__name__,
                        self._path,
                    )
        if len(offsets) == 1:
            raise ValueError(f"The {type(batches).__name__} must yield at least one batch. Received an empty one.")
        self._offsets = np.array(offsets, np.int64)
        super().__init__(len(offsets) - 1)

    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        with open(self._path, "rb") as file:
            file.seek(int(self._offsets[start]))
            for _ in range(start, end):
                yield self._layout.batch(pickle.load(file))
