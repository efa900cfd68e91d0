"""The batches of a task: records of a reader, converted by the model file's feeds; or batches of a batch source."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from elasticcb.data import Reader, checked_sources, open_reader
from elasticcb.data.bad_records import BadRecords
from elasticcb.data.batch_sources.record_batches import RecordBatches
from elasticcb.data.batch_sources.records import StreamSource
from elasticcb.data.batches import BatchSource, NextBatch
from elasticcb.data.file_reader import FileReader
from elasticcb.data.formats import is_stream
from elasticcb.data.growing_files import SETTLE, GrowingFiles
from elasticcb.data.unbounded import UnboundedSource
from elasticcb.errors import DataError, StreamError, UsageError
from elasticcb.model.spec import Spec
from elasticcb.settings import JobSettings, Mode

logger = logging.getLogger(__name__)

Sources = list[tuple[str, int]]

FAIL, SKIP = "fail", "skip"  # settings of bad records; any other is a folder
_FEW_RECORDS = 256  # in which a feed that drops records leaves some
_LOOK_AGAIN_SECONDS = 1.0  # while a stream does not answer
_UNKNOWN = 1 << 40  # batches in an epoch of unknown length: more than possible


class Pipeline(Protocol):
    """The input of one mode. Tasks measure it in units: records or whole batches."""

    keeps_order: bool  # whether the n-th unit of the output is the n-th of the shard
    ends_by_itself: bool  # whether it may yield fewer batches than the shard has
    open_ended: bool  # whether the number of units in an epoch is unknown
    repeatable: bool  # whether a shard has the same units in the next run of the program
    fed_by: str  # what may drop, multiply or reorder units, for messages
    stream: UnboundedSource | None  # what it reads, if that grows while the job trains
    bad: BadRecords | None  # finds records that can't be converted; None: they are an error

    @property
    def fixed(self) -> Sequence[bool]:
        """As in `BatchSource`."""

    @property
    def element_spec(self) -> Any:
        """Of a batch; in prediction, of its features."""

    def sources(self) -> Sources:
        """(name, units) of each source."""

    def batches(self, name: str, start: int, end: int, epoch: int = 0) -> Iterator[Any]:
        """Yields the batches of the units [start, end) of a source, in the form that Keras passes to the model's
        step."""

    def units_in(self, batch: Any) -> int:
        """The number of units in a batch."""

    def first_batch(self) -> Any:
        """A batch for building a model."""


def open_pipeline(
    settings: JobSettings,
    spec: Spec,
    mode: Mode,
    find_index: Callable[[str], bytes] | None = None,
    next_batch: NextBatch | None = None,
) -> Pipeline:
    """Opens the input of a mode.

    Args:
        next_batch: on a worker: requests a batch of data that only the master's process has.

    Raises:
        DataError: the data can't be read.
        ModelFileError: there is no feed, or it raises or returns something unusable.
    """
    source = spec.batch_source(mode)
    if source is None:
        return _of_files(settings, spec, mode, find_index, next_batch is not None)
    source.select(spec.inputs)
    if isinstance(source, StreamSource):
        return FeedPipeline(source.opened(), mode, settings.training.minibatch_size, waits=next_batch is not None)
    if next_batch is not None:
        source.connect(next_batch)
    return BatchPipeline(source, mode)


def _of_files(
    settings: JobSettings, spec: Spec, mode: Mode, find_index: Callable[[str], bytes] | None, waits: bool
) -> FeedPipeline:
    """The input that a command names."""
    origin = getattr(settings.data, "validation" if mode is Mode.EVALUATION else mode.value)
    grows = mode is Mode.TRAINING
    params = {} if not grows and is_stream(settings.data.training) else settings.data.reader_params  # else the stream's
    reader = open_reader(
        origin,
        {name: value for name, value in params.items() if grows or name != SETTLE},
        custom=spec.custom_data_reader,
        records_per_task=settings.training.minibatch_size * settings.training.batches_per_task(None, 1),
        follow=grows and settings.data.follow,
    )
    if isinstance(reader, UnboundedSource) and mode is not Mode.TRAINING:
        raise UsageError(
            f"The {mode} data {origin} is a stream, which never ends. Expected files; only training data may grow."
        )
    files = reader.files if isinstance(reader, GrowingFiles) else reader
    if isinstance(files, FileReader):
        files.find_index = find_index
    batches = RecordBatches(
        reader,
        mode.value,
        settings.training.minibatch_size,
        feed=spec.feed,
        feed_batch=spec.feed_batch,
        label=settings.data.label,
        inputs=spec.inputs,
        call=spec.call,
        name=lambda name: f"`{getattr(settings.model, name)}` in {spec.path}",
        owner=str(spec.path),
    )
    bad = settings.data.bad_records if grows else FAIL
    few = settings.dry_run
    return FeedPipeline(batches, mode, settings.training.minibatch_size, reads_few=few, bad_records=bad, waits=waits)


class BatchPipeline:
    """The batches of a `BatchSource`, as tensors."""

    fed_by = "The data"
    stream: UnboundedSource | None = None
    bad: BadRecords | None = None

    def __init__(self, source: BatchSource, mode: Mode) -> None:
        self._source = source
        self._mode = mode
        self._first: Any = None
        self.keeps_order = source.keeps_order
        # Evaluation and prediction count each batch exactly once, so their sources must know the number.
        self.ends_by_itself = source.ends_early and mode is Mode.TRAINING
        self.open_ended = source.num_batches is None
        self.repeatable = source.repeatable

    @property
    def fixed(self) -> Sequence[bool]:
        return self._source.fixed

    @property
    def element_spec(self) -> Any:
        batch = self.first_batch()
        if self._mode is Mode.PREDICTION:
            batch = keras.utils.unpack_x_y_sample_weight(batch)[0]
        return tf.nest.map_structure(_spec_of, batch)

    def sources(self) -> Sources:
        count = self._source.num_batches
        return [(self._mode.value, _UNKNOWN if count is None else count)]

    def batches(self, name: str, start: int, end: int, epoch: int = 0) -> Iterator[Any]:
        yield from map(_tensors, self._source.batches(epoch, start, end))

    def units_in(self, batch: Any) -> int:
        return 1

    def first_batch(self) -> Any:
        if self._first is None:
            batch = self._source.first_batch()  # which does not take it from an epoch
            if batch is None:
                raise DataError(f"The {self._mode} data has no batches. Provide at least one batch.")
            self._first = _tensors(batch)
        return self._first


def _tensors(batch: Any) -> Any:
    return tf.nest.map_structure(_as_tensor, batch)


def _as_tensor(leaf: Any) -> Any:
    composite = leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    return leaf if composite else tf.convert_to_tensor(leaf)


def _spec_of(leaf: Any) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return tf.type_spec_from_value(leaf)
    return tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)


class FeedPipeline:
    """The batches of one mode: records of a reader, converted by feeds.

    Args:
        reads_few: only enough records for a batch.
        bad_records: what to do with those that can't be converted: `FAIL`, `SKIP`, or a folder to keep them in.
        waits: wait for the first batch while a stream does not answer, as on workers, which others have begun with it.

    Attributes:
        bad: finds those; None: they are an error.
    """

    ends_by_itself = False
    open_ended = False
    repeatable = True
    fixed: Sequence[bool] = ()

    def __init__(
        self,
        batches: RecordBatches,
        mode: Mode,
        minibatch_size: int,
        reads_few: bool = False,
        bad_records: str = FAIL,
        waits: bool = False,
    ) -> None:
        self.reader: Reader = batches.reader
        self.stream = self.reader if isinstance(self.reader, UnboundedSource) else None
        self._minibatch_size, self._reads_few, self._waits = minibatch_size, reads_few, waits
        self._predicts = mode is Mode.PREDICTION  # then the feed returns only features
        self._batches = batches
        self.keeps_order, self.fed_by = batches.keeps_order, batches.fed_by
        self.bad: BadRecords | None = None
        if bad_records != FAIL:
            folder = "" if bad_records == SKIP else bad_records
            self.bad = BadRecords(self.reader, self._convert, self.keeps_order, folder)

    def _convert(self, name: str, start: int, end: int) -> Iterator[Any]:
        return self._batches.batches([(name, start, end)])

    @property
    def element_spec(self) -> Any:
        """Of a batch; in prediction, of its features."""
        return self._batches.element_spec

    def sources(self) -> Sources:
        if self.stream is not None:
            return []
        if self._reads_few:  # without scanning the data
            few = self._minibatch_size if self.keeps_order else max(self._minibatch_size, _FEW_RECORDS)
            for name, head in self._beginnings():
                if count := head(few):
                    return [(name, count)]
        return [(source.name, source.count) for source in checked_sources(self.reader)]

    def units_in(self, batch: Any) -> int:
        return records_in(batch) + (0 if self.bad is None else self.bad.passed())

    def batches(self, name: str, start: int, end: int, epoch: int = 0) -> Iterator[Any]:
        """Yields the batches of records [start, end) of a source. Raises the reader's errors."""
        found = (
            self._convert(name, start, end)
            if self.bad is None
            else self.bad.good_batches(name, start, end, self._minibatch_size, records_in)
        )
        for batch in found:
            yield (batch,) if self._predicts else batch

    def first_batch(self) -> Any:
        """A batch from the start of the data, for building a model."""
        try:
            return self._first_batch()
        finally:
            if self.bad is not None:
                self.bad.take()  # the tasks with these records count them

    def _first_batch(self) -> Any:
        if self.stream is not None:
            for records in (self._minibatch_size, _FEW_RECORDS):
                for batch in self.batches(*self._beginning_of(self.stream, records)):
                    return batch
        tried = 0
        for name, head in self._beginnings():
            count = 0
            for records in (self._minibatch_size, _FEW_RECORDS, sys.maxsize):
                count = head(records)
                if not count:
                    break
                for batch in self.batches(name, 0, count):
                    return batch
            tried += count
        raise DataError(f"{self.fed_by} returned no examples for all {tried} records. It must return at least one.")

    def _beginning_of(self, stream: UnboundedSource, records: int) -> tuple[str, int, int]:
        while True:
            try:
                return stream.beginning(records)
            except StreamError as error:
                if not self._waits:
                    raise
                logger.warning("%s This process waits for it.", error)
                time.sleep(_LOOK_AGAIN_SECONDS)

    def _beginnings(self) -> Iterator[tuple[str, Callable[[int], int]]]:
        """Each source, with a function that returns its number of records, up to a limit."""
        if isinstance(self.reader, FileReader):
            for name in self.reader.names:  # without scanning all data
                yield name, functools.partial(self.reader.head, name)
        else:
            for source in self.reader.sources():
                yield source.name, functools.partial(min, source.count)


def records_in(batch: Any) -> int:
    """The number of records in a batch of dense, ragged or sparse tensors."""
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return int(first.nrows())
    if isinstance(first, tf.SparseTensor):
        return int(first.dense_shape[0])
    return int(first.shape[0])
