"""The batches of a task: from the records of a reader, through the model file's `feed`; or those of a source that
has batches already."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from elasticcb.data import Reader, RecordStream, checked_sources, open_reader
from elasticcb.data.batches import BatchSource
from elasticcb.errors import DataError, ModelFileError, user_traceback
from elasticcb.settings import JobSettings
from elasticcb.spec import Spec

Sources = list[tuple[str, int]]

_UNKNOWN = 1 << 40  # batches in an epoch of which nobody knows how many it has: more than there can be


class Pipeline(Protocol):
    """The input of one mode. Tasks count it in units: records, or whole batches."""

    keeps_order: bool  # whether the n-th unit that comes out is the n-th of the shard
    ends_by_itself: bool  # whether it may give fewer batches than a shard has
    open_ended: bool  # whether nobody knows how many units an epoch has

    @property
    def element_spec(self) -> Any:
        """Of a batch."""

    def sources(self) -> Sources:
        """(name, units) of each source."""

    def batches(self, name: str, start: int, end: int, epoch: int = 0) -> Iterator[Any]:
        """The batches of the units [start, end) of a source."""

    def units_in(self, batch: Any) -> int:
        """How many units a batch is."""

    def first_batch(self) -> Any:
        """A batch to build a model with."""


def open_pipeline(settings: JobSettings, spec: Spec, mode: str) -> Pipeline:
    """The input of "training", "evaluation" or "prediction".

    Raises:
        DataError: the data can't be read.
        ModelFileError: there is no `feed`, or it raises or returns no dataset.
    """
    source = spec.batch_source(mode)
    return FeedPipeline(settings, spec, mode) if source is None else BatchPipeline(source, mode)


class BatchPipeline:
    """The batches of a `BatchSource`, as tensors."""

    keeps_order = True

    def __init__(self, source: BatchSource, mode: str) -> None:
        self._source = source
        self._mode = mode
        self._first: Any = None
        # Evaluation and prediction count each batch exactly once, so their sources must know.
        self.ends_by_itself = mode == "training"
        self.open_ended = source.num_batches is None

    @property
    def element_spec(self) -> Any:
        return tf.nest.map_structure(_spec_of, self.first_batch())

    def sources(self) -> Sources:
        count = self._source.num_batches
        return [(self._mode, _UNKNOWN if count is None else count)]

    def batches(self, name: str, start: int, end: int, epoch: int = 0) -> Iterator[Any]:
        yield from map(self._tensors, self._source.batches(epoch, start, end))

    def units_in(self, batch: Any) -> int:
        return 1

    def first_batch(self) -> Any:
        if self._first is None:
            batch = self._source.first_batch()  # which takes none from the epochs
            if batch is None:
                raise DataError(f"The {self._mode} data has no batch; there is nothing to work on.")
            self._first = self._tensors(batch)
        return self._first

    def _tensors(self, batch: Any) -> Any:
        if self._mode == "prediction":
            batch = keras.utils.unpack_x_y_sample_weight(batch)[0]
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
    """The batches of one mode: reader, the model file's `feed`, batching, prefetch; traced once.

    Args:
        mode: "training", "evaluation" or "prediction".

    Raises:
        DataError: the data can't be read.
        ModelFileError: there is no `feed`, or it raises or returns no dataset.
    """

    ends_by_itself = False
    open_ended = False

    def __init__(self, settings: JobSettings, spec: Spec, mode: str) -> None:
        origin = getattr(settings.data, mode if mode != "evaluation" else "validation")
        self.reader: Reader = open_reader(
            origin,
            settings.data.reader_params,
            custom=spec.custom_data_reader,
            records_per_task=settings.training.records_per_task,
        )
        self._range = ("", 0, 0)
        self._stream = RecordStream(self.reader, lambda: self._range)
        feed = spec.feed or self.reader.default_feed()
        if feed is None:
            raise ModelFileError(
                f"{spec.path} has no `{settings.model.feed}(dataset, mode, metadata)`, and the reader of {origin} "
                "brings no default. Define one that turns records into (features, labels)."
            )
        raw = self._stream.dataset
        fed = spec.call(feed, raw, mode, self.reader.metadata)
        if not isinstance(fed, tf.data.Dataset):
            raise ModelFileError(
                f"`{settings.model.feed}` in {spec.path} returned {type(fed).__name__}; expected a tf.data.Dataset."
            )
        _check(raw, fed, spec.path)
        self.keeps_order = _keeps_order(raw, fed)
        self.dataset = fed.batch(settings.training.minibatch_size).prefetch(2)

    @property
    def element_spec(self) -> Any:
        """Of a batch."""
        return self.dataset.element_spec

    def sources(self) -> Sources:
        return [(source.name, source.count) for source in checked_sources(self.reader)]

    def units_in(self, batch: Any) -> int:
        return records_in(batch)

    def batches(self, name: str, start: int, end: int, epoch: int = 0) -> Iterator[Any]:
        """The batches of records [start, end) of a source. Raises what the reader raised."""
        self._range = (name, start, end)
        try:
            yield from self.dataset
        except tf.errors.OpError as error:
            self._stream.raise_error()
            hint = ""
            if "different shapes" in error.message or "add tensor to the batch" in error.message:
                hint = (
                    " `feed` must give every example the same shape, which the batch then stacks: pad them, or end "
                    "it with `dataset.ragged_batch(1).unbatch()` to get ragged batches."
                )
            raise DataError(
                f"Records [{start}, {end}) of {name} can't be turned into batches by `feed`: {_readable(error)}{hint}",
                user_traceback(error),
            ) from error

    def first_batch(self) -> Any:
        """A batch from the start of the data, to build a model with: small unless `feed` drops records."""
        tried = 0
        for source in self.reader.sources():
            for records in (2, 256, source.count):
                for batch in self.batches(source.name, 0, min(records, source.count)):
                    return batch
            tried += source.count
        raise DataError(f"`feed` turned all {tried} records into no example; there is nothing to work on.")


def _readable(error: tf.errors.OpError) -> str:
    """TensorFlow's message without the names of nodes and operations."""
    return re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\]( name:\s*\S*)?", "", error.message).strip()


# What a `feed` must not do, by TensorFlow's name of the dataset: its iterator is made anew for each task.
_REFUSED = {
    "IgnoreErrors": "ignores errors, so a file that can't be read would be asked for again without end. Leave "
    "`ignore_errors` out, and `filter` the records that are not wanted",
    "CacheDataset": "caches: every task after the first would get the first one's records. Leave `cache` out",
    "RepeatDataset": "repeats: a task ends with its last record, and --num_epochs repeats. Leave `repeat` out",
    "BatchDataset": "makes batches: the framework does, with --minibatch_size. Leave `batch` out, or end with "
    "`unbatch`",
}
_ONE_TO_ONE = ("MapDataset", "PrefetchDataset", "OptionsDataset")


def _steps(raw: tf.data.Dataset, fed: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """What `feed` did to `raw`, from the last step to `raw` itself."""
    pending = [fed]
    while pending:
        step = pending.pop()
        yield step
        if step is not raw:
            pending.extend(step._inputs())


def _check(raw: tf.data.Dataset, fed: tf.data.Dataset, path: Any) -> None:
    """Raises `ModelFileError` when `feed` does what breaks the accounting of records."""
    if all(step is not raw for step in _steps(raw, fed)):
        raise ModelFileError(
            f"`feed` in {path} returns a dataset that is not made from the one it is given, so every task would "
            "hold the same records. Return dataset.map(...), or the like."
        )
    unbatches = False
    for step in _steps(raw, fed):
        kind = type(step).__name__
        unbatches = unbatches or "Unbatch" in kind or "FlatMap" in kind
        for name, why in _REFUSED.items():
            if name in kind and not (name == "BatchDataset" and unbatches):
                raise ModelFileError(f"`feed` in {path} {why}.")


def _keeps_order(raw: tf.data.Dataset, fed: tf.data.Dataset) -> bool:
    """Whether `fed` holds one example per record of `raw`, in its order, every time.

    Known for chains of maps and the like; anything else counts as no, and then a task that is taken
    over starts at its beginning.
    """
    steps = [step for step in _steps(raw, fed) if step is not raw]
    if fed.options().deterministic is False or any(getattr(s, "_deterministic", "") == "false" for s in steps):
        return False  # `map(..., num_parallel_calls=…, deterministic=False)`
    kinds = [type(step).__name__ for step in steps]
    return all("FlatMap" not in kind and any(name in kind for name in _ONE_TO_ONE) for kind in kinds)


def records_in(batch: Any) -> int:
    """How many records a batch of dense, ragged or sparse tensors holds."""
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return int(first.nrows())
    if isinstance(first, tf.SparseTensor):
        return int(first.dense_shape[0])
    return int(first.shape[0])
