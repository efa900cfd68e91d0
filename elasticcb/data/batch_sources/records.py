"""Batches of the records of a reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batches import PassSource, source_seed
from elasticcb.data.feeds import batch_error, batched, check_feed, keeps_order, told_of
from elasticcb.data.reader import Reader, checked_sources
from elasticcb.data.stream import RecordStream
from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.settings import Mode

if TYPE_CHECKING:
    from elasticcb.data.reader import Feed

_ALL = 1 << 31  # number of examples in a batch: all


class Records:
    """A reader with the `feed` that converts its records to examples, as data for `fit`.

    Args:
      reader: any reader.
      feed: `feed(dataset, mode, metadata)`, as in a model file: maps raw records to `(features, labels[,
        sample_weight])`, or to features only if `mode` is `Mode.PREDICTION`; not batched. Default: the reader's default
        feed.
    """

    def __init__(self, reader: Reader, feed: Feed | None = None) -> None:
        if not isinstance(reader, Reader):
            raise TypeError(
                f"`reader` must be an elasticcb.data.Reader. Received: {reader} of type {type(reader).__name__}"
            )
        if feed is not None and not callable(feed):
            raise TypeError(f"`feed` must be a callable feed(dataset, mode, metadata). Received: {feed}")
        self.reader = reader
        self.feed = feed

    def __repr__(self) -> str:
        return f"Records({type(self.reader).__name__}, feed={getattr(self.feed, '__name__', self.feed)})"


class RecordSource(PassSource):
    """Batches of consecutive records, each from one source; the last batch of a source may be short.

    If the feed keeps one example per record, batches have `batch_size` examples. If it filters or multiplies examples,
    each batch has all examples of `batch_size` records: batches then differ in size, and a batch whose records were all
    dropped does not exist.

    Args:
      mode: the feed's second argument.
      shuffle: read the batches of a pass in an order of their own for each pass.
      steps: see `PassSource`.
      limit: of batches in a pass.

    Raises `DataError` if there are no records, `ModelFileError` if there is no feed.
    """

    def __init__(
        self,
        records: Records,
        batch_size: int,
        *,
        mode: str = Mode.TRAINING,
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool = False,
        steps: int | None = None,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self.given = records
        self._sources = [source for source in checked_sources(records.reader) if source.count]
        self.num_records = sum(source.count for source in self._sources)
        batches = [-(-source.count // batch_size) for source in self._sources]
        self._ends = np.cumsum(batches)  # cumulative numbers of batches of the sources
        size = int(self._ends[-1])
        super().__init__(min(size, limit or size), steps)
        self._batch_size = batch_size
        self._mode = mode
        self._class_weight = class_weight
        self._shuffle = shuffle
        self._seed = seed
        self._pipeline: _Pipeline | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None}

    @property
    def keeps_order(self) -> bool:  # type: ignore[override]
        """Whether the feed keeps one example per record; if not, some batch numbers may have no batch."""
        return self._opened().keeps_order

    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        pipeline = self._opened()
        if not self._shuffle:
            indices = np.arange(start, end)
        else:
            generator = np.random.Generator(np.random.PCG64(source_seed(self._seed, number)))
            indices = generator.permutation(self.size)[start:end]
        for first, last in self._runs(indices):
            place = int(np.searchsorted(self._ends, first, side="right"))
            source = self._sources[place]
            offset = int(self._ends[place - 1]) if place else 0
            begin, stop = (first - offset) * self._batch_size, (last + 1 - offset) * self._batch_size
            yield from pipeline.batches(source.name, begin, min(stop, source.count))

    def first_batch(self) -> Any:
        # The feed may drop all records of the first batches.
        return next(self.batches(self.first_epoch, 0, self.num_batches), None)

    def close(self) -> None:
        self._pipeline = None

    def _opened(self) -> _Pipeline:
        if self._pipeline is None:
            self._pipeline = _Pipeline(self.given, self._mode, self._batch_size, self._class_weight)
        return self._pipeline

    def _runs(self, indices: Any) -> Iterator[tuple[int, int]]:
        """Ranges that can be read at once, as (first, last)."""
        cuts = np.diff(indices) != 1
        cuts |= np.isin(indices[1:], self._ends)  # the first batch of the next source
        if not self.keeps_order:
            cuts[:] = True
        for run in np.split(indices, np.flatnonzero(cuts) + 1):
            yield int(run[0]), int(run[-1])


class _Pipeline:
    """A reader's records, mapped by a feed and batched; traced once."""

    def __init__(self, records: Records, mode: str, batch_size: int, class_weight: Mapping[int, float] | None) -> None:
        self._range, self._reader = ("", 0, 0), records.reader
        self._stream = RecordStream(records.reader, lambda: self._range)
        feed = records.feed or records.reader.default_feed()
        if feed is None:
            raise ModelFileError(
                f"{type(records.reader).__name__} can't distinguish features from labels. Pass "
                "elasticcb.data.Records(reader, feed), where feed(dataset, mode, metadata) converts records to "
                "(features, labels)."
            )
        raw = self._stream.dataset
        try:
            fed = feed(raw, str(mode), records.reader.metadata)
        except ElasticCBError:
            raise
        except Exception as error:
            raise ModelFileError(
                f"The feed of {records} raised {describe(error)}\n{told_of(raw, records.reader)}", user_traceback(error)
            ) from error
        if not isinstance(fed, tf.data.Dataset):
            raise ModelFileError(f"The feed of {records} returned {type(fed).__name__}; expected a tf.data.Dataset.")
        check_feed(raw, fed, f"The feed of {records}")
        self.keeps_order = keeps_order(raw, fed)
        dataset = batched(raw, fed, batch_size if self.keeps_order else _ALL)
        if not self.keeps_order:
            # A preceding `map` would be fused with the batch, which would then allocate memory for _ALL examples.
            options = tf.data.Options()
            options.experimental_optimization.map_and_batch_fusion = False
            dataset = dataset.with_options(options)
        self._dataset = keras_data.weighted(dataset, class_weight).prefetch(2)

    def batches(self, name: str, start: int, end: int) -> Iterator[Any]:
        self._range = (name, start, end)
        try:
            yield from self._dataset
        except tf.errors.OpError as error:
            self._stream.raise_error()
            raise batch_error(error, name, start, end, self._reader) from error
