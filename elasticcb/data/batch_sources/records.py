"""Batches of the records of a reader."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.data.batch_sources.record_batches import RecordBatches
from elasticcb.data.batches import BatchSource, PassSource, source_seed
from elasticcb.data.formats import open_reader
from elasticcb.data.reader import Reader, checked_sources
from elasticcb.data.stream import Range
from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.settings import Mode

if TYPE_CHECKING:
    from elasticcb.data.reader import Feed, FeedBatch

# Consecutive batches are read together, but a pass has this many blocks or more that `shuffle` can order.
_BATCHES_PER_BLOCK = 16
_BLOCKS = 64


def read(
    origin: str | os.PathLike[str] | Reader,
    *,
    label: str = "",
    feed_batch: FeedBatch | None = None,
    feed: Feed | None = None,
    follow: bool = False,
    **reader_params: Any,
) -> Records:
    """Records of files, as data for `fit`, `evaluate` and `predict`: `fit(model, read("*.parquet", label="y"))`.

    Workers read them from the files. A batch has `batch_size` consecutive records of a file, the last one of a file may
    have fewer.

    Args:
      origin: a path, glob, folder or URL, or several joined by commas; or a `Reader`.
      label: the column of labels. The features are a dict of the other columns, `{name: tensor (batch,)}`.
      feed_batch: `feed_batch(records, mode, metadata)`, as in a model file: converts the records of a batch to
        `(features, labels[, sample_weight])`, or to features only if `mode` is `Mode.PREDICTION`.
      feed: `feed(dataset, mode, metadata)`, as in a model file: maps a dataset of single records.
      follow: train also on files that are added while `fit` runs; its epochs have `steps_per_epoch`, or it never ends.
      reader_params: parameters of the format's reader, such as `header=True`, and `format`.

    Raises:
      DataError: there are no files, or they don't all have the same known format.
      UsageError: a reader parameter is unknown or has an invalid value.
      TypeError: an argument has a wrong type.
    """
    if isinstance(origin, Reader):
        if reader_params or follow:
            given = [*reader_params, *(["follow"] if follow else [])]
            raise TypeError(f"A Reader takes no parameters here. Received: {', '.join(given)}")
        return Records(origin, feed, feed_batch, label)
    if not isinstance(origin, str | os.PathLike):
        raise TypeError(
            "`origin` must be a path, glob, folder or URL, or an elasticcb.data.Reader. Received: "
            f"{origin} of type {type(origin).__name__}"
        )
    return Records(open_reader(os.fspath(origin), reader_params, follow=follow), feed, feed_batch, label)


class Records:
    """A reader with its feeds, as data for `fit`: what `elasticcb.data.read` returns."""

    def __init__(
        self, reader: Reader, feed: Feed | None = None, feed_batch: FeedBatch | None = None, label: str = ""
    ) -> None:
        if not isinstance(reader, Reader):
            raise TypeError(
                f"`reader` must be an elasticcb.data.Reader. Received: {reader} of type {type(reader).__name__}"
            )
        for name, given, signature in (
            ("feed", feed, "dataset, mode, metadata"),
            ("feed_batch", feed_batch, "records, mode, metadata"),
        ):
            if given is not None and not callable(given):
                raise TypeError(f"`{name}` must be a callable {name}({signature}). Received: {given}")
        self.reader = reader
        self.feed = feed
        self.feed_batch = feed_batch
        self.label = label

    def __repr__(self) -> str:
        given = {"feed": self.feed, "feed_batch": self.feed_batch, "label": self.label}
        shown = [f"{name}={getattr(value, '__name__', value)}" for name, value in given.items() if value]
        return f"Records({', '.join([type(self.reader).__name__, *shown])})"

    def batches(
        self,
        mode: str,
        batch_size: int,
        class_weight: Mapping[int, float] | None = None,
        joins: bool = True,
        inputs: Sequence[str] | None = None,
    ) -> RecordBatches:
        """Its batches: see `RecordBatches`."""
        return RecordBatches(
            self.reader,
            mode,
            batch_size,
            feed=self.feed,
            feed_batch=self.feed_batch,
            label=self.label,
            inputs=inputs,
            call=self._call,
            name=lambda name: f"`{name}` of {self}",
            owner=repr(self),
            joins=joins,
            class_weight=class_weight,
        )

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except ElasticCBError:
            raise
        except Exception as error:
            name = getattr(function, "__name__", repr(function))
            raise ModelFileError(f"{name}() of {self} raised {describe(error)}", user_traceback(error)) from error


class StreamSource(BatchSource):
    """Records of a source that grows, whose tasks are ranges of records, not of batches.

    Args:
      steps: batches in an epoch; None: it ends with the stream.
    """

    num_batches = None

    def __init__(
        self, records: Records, batch_size: int, class_weight: Mapping[int, float] | None, steps: int | None
    ) -> None:
        self.given, self.batch_size, self.steps = records, batch_size, steps
        self._class_weight = class_weight
        self._inputs: Sequence[str] | None = None

    def opened(self) -> RecordBatches:
        """Its batches, by ranges of records."""
        return self.given.batches(Mode.TRAINING, self.batch_size, self._class_weight, joins=False, inputs=self._inputs)

    def batches(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        raise TypeError("A stream has no numbered batches.")

    def select(self, inputs: Sequence[str] | None) -> None:
        self._inputs = inputs

    def close(self) -> None:
        self.given.reader.close()


class RecordSource(PassSource):
    """Batches of consecutive records, each from one source; the last batch of a source may be short.

    If the feed keeps one example per record, batches have `batch_size` examples. If it filters or multiplies examples,
    each batch has all examples of `batch_size` records: batches then differ in size, and a batch whose records were all
    dropped does not exist.

    Args:
      mode: the feed's second argument.
      shuffle: read blocks of consecutive batches in an order of their own for each pass.
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
        self._inputs: Sequence[str] | None = None
        self._pipeline: RecordBatches | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None}

    @property
    def keeps_order(self) -> bool:  # type: ignore[override]
        """Whether the feed keeps one example per record; if not, some batch numbers may have no batch."""
        return self._opened().keeps_order

    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        pipeline = self._opened()
        ranges = [self._range_of(*run) for run in self._runs(self._order(number)[start:end])]
        part: list[Range] = []  # read at once
        for place, each in enumerate(ranges, 1):
            part.append(each)
            is_whole = pipeline.keeps_order and (each[2] - each[1]) % self._batch_size == 0
            if not is_whole or place == len(ranges):  # the next batch must not begin in this range
                yield from pipeline.batches(part)
                part = []

    def _order(self, number: int) -> Any:
        """The batches of pass `number`, in the order in which they are read."""
        if not self._shuffle:
            return np.arange(self.size)
        generator = np.random.Generator(np.random.PCG64(source_seed(self._seed, number)))
        size = min(_BATCHES_PER_BLOCK, max(self.size // _BLOCKS, 1))
        blocks = generator.permutation(-(-self.size // size))
        order = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return order[order < self.size]

    def _range_of(self, first: int, last: int) -> Range:
        """The records of consecutive batches of a source."""
        place = int(np.searchsorted(self._ends, first, side="right"))
        source = self._sources[place]
        offset = int(self._ends[place - 1]) if place else 0
        begin, stop = (first - offset) * self._batch_size, (last + 1 - offset) * self._batch_size
        return source.name, begin, min(stop, source.count)

    def first_batch(self) -> Any:
        # The feed may drop all records of the first batches.
        return next(self.batches(self.first_epoch, 0, self.num_batches), None)

    def select(self, inputs: Sequence[str] | None) -> None:
        if inputs != self._inputs:
            self._inputs, self._pipeline = inputs, None

    def close(self) -> None:
        self._pipeline = None

    def _opened(self) -> RecordBatches:
        if self._pipeline is None:
            self._pipeline = self.given.batches(self._mode, self._batch_size, self._class_weight, inputs=self._inputs)
        return self._pipeline

    def _runs(self, indices: Any) -> Iterator[tuple[int, int]]:
        """Ranges that can be read at once, as (first, last)."""
        cuts = np.diff(indices) != 1
        cuts |= np.isin(indices[1:], self._ends)  # the first batch of the next source
        if not self.keeps_order:
            cuts[:] = True
        for run in np.split(indices, np.flatnonzero(cuts) + 1):
            yield int(run[0]), int(run[-1])
