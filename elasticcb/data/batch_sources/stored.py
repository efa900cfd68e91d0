"""Batches that were read once, written to a file, and are read from there by number."""

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
    """All batches of an iterable, each once in a pass, in its order.

    They are read when the source is made, in the process that makes it, so anything can be iterated: a
    `tf.data.Dataset`, a generator. Its files are read without being loaded as a whole.

    Args:
      batches: without an end only with a `limit`.
      limit: of batches that are read; None: all.
      folder: where the file is written.

    Raises `ValueError` when there is no batch.
    """

    def __init__(self, batches: Iterable[Any], *, limit: int | None, folder: Path) -> None:
        offsets = [0]
        with tempfile.NamedTemporaryFile(prefix="batches-", suffix=".bin", dir=folder, delete=False) as file:
            self._path = file.name
            for batch in map(keras_data.to_batch, itertools.islice(batches, limit)):
                if len(offsets) == 1:
                    self._layout = Layout(batch)
                pickle.dump(self._layout.arrays(batch), file, protocol=pickle.HIGHEST_PROTOCOL)
                offsets.append(file.tell())
                if limit is None and offsets[-1] >= _LARGE_BYTES > offsets[-2]:
                    _LOGGER.warning(
                        "%d batches of %s are written to %s so far, and it has not ended. Pass the number of steps if "
                        "it has no end.",
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
