"""Batches of the records of a reader: `feed` maps single records, `feed_batch` maps batches; without them, the columns
of the data become features and labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.columns import columns_of, named_feed
from elasticcb.data.reader import Reader
from elasticcb.data.stacking import flatten
from elasticcb.data.stream import Range, RecordStream, flat_tensors_of, not_converted, read_batches, spec_of_batches
from elasticcb.errors import DataError, ModelFileError
from elasticcb.settings import Mode
from elasticcb.tf.batch_signatures import QuickCall, quick_call

if TYPE_CHECKING:
    from elasticcb.data.reader import Feed, FeedBatch, Reader

_ALL = 1 << 31  # number of examples in a batch: all
_PARTS = ("features", "labels", "sample weights")
_WHERE_IN_GRAPH = re.compile(
    r"^Graph execution error:\s*(Detected at node .*\s*(File \".*\s*|<stack traces unavailable>\s*)+)?"
)


class RecordBatches:
    """Batches of the records of ranges; the functions of the user are traced once.

    Args:
      mode: the second argument of the user's functions.
      feed: from a dataset of single records to one of examples, or of records for `feed_batch`.
      feed_batch: from the records of a batch to the batch that the model gets. Without both, the reader's default feed,
        or its columns.
      label: the column of labels; only without `feed` and `feed_batch`.
      inputs: likewise, the columns that become features; None: all. The model's inputs.
      call: calls a function of the user; its errors become `ModelFileError`s.
      name: how messages name a function of the user: `"feed"`, `"feed_batch"`.
      owner: what lacks a feed, for messages.
      joins: if `feed` drops or multiplies records, make one batch of all examples of a range.

    Attributes:
      keeps_order: whether the n-th example is made of the n-th record.
      element_spec: of a batch.
      fed_by: what maps single records, for messages.

    Raises:
      DataError: the columns of the data, or the label, can't be found.
      ModelFileError: there is no feed; `feed` or `feed_batch` raises, or returns something unusable.
    """

    def __init__(
        self,
        reader: Reader,
        mode: str,
        batch_size: int,
        *,
        feed: Feed | None,
        feed_batch: FeedBatch | None,
        label: str,
        inputs: Sequence[str] | None,
        call: Callable[..., Any],
        name: Callable[[str], str],
        owner: str,
        joins: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        self.reader = reader
        self.keeps_order = True
        self._ranges: Sequence[Range] = ()
        self._call = call
        self._explain: Callable[..., Any] = lambda *_: None
        self.fed_by = name("feed")
        converted = feed_batch is not None
        if feed is None and feed_batch is None:
            feed, self.fed_by = reader.default_feed(), "`default_feed` of the reader"
        self._what = name("feed_batch") if feed_batch else self.fed_by
        if label and (feed or feed_batch):
            raise ModelFileError(
                f"The label {label!r} is for data without a feed, but there is {self._what}. Remove one of them."
            )
        if feed is None and feed_batch is None:
            reader.may_lack = label if mode == Mode.PREDICTION else ""
            columns = columns_of(reader)
            if columns is None:
                raise ModelFileError(
                    f"{owner} has no `feed_batch(records, mode, metadata)` and no `feed`, and the columns of the "
                    f"records are not known.{reader.unknown_columns} Otherwise, define a feed that converts records "
                    "to (features, labels)."
                )
            feed_batch, self._explain = named_feed(columns, label, inputs), columns.explain
            self._what = "its columns"
        self._spec, self._batch_size = reader.element_spec, batch_size
        self._dataset: Any = None  # of what `feed` returns, in batches; each of its iterators reads `_ranges`
        self._converted: QuickCall | None = None  # takes the tensors of a batch
        self.element_spec = spec_of_batches(self._spec)
        if feed is not None:
            self._stream = RecordStream(reader, lambda: self._ranges)
            self._dataset = self._fed(feed, mode, batch_size, joins)
            if feed_batch is None:
                self._dataset = keras_data.weighted(self._dataset, class_weight)
            self._dataset = self._dataset.prefetch(2)
            self.element_spec = self._dataset.element_spec
        if feed_batch is not None:
            self._converted = self._traced_feed_batch(feed_batch, mode, converted, class_weight)
            self.element_spec = tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), self._converted.outputs
            )

    def batches(self, ranges: Sequence[Range]) -> Iterator[Any]:
        """Yields the batches of the ranges. With `feed`, a batch may span two if the first one is not made of whole
        batches. Raises the reader's errors."""
        self._ranges = ranges
        try:
            if self._dataset is None:
                assert self._converted is not None
                for batch in read_batches(self.reader, self._spec, ranges, self._batch_size):
                    yield self._converted(flat_tensors_of(self._spec, batch))
            elif self._converted is None:
                yield from self._dataset
            else:
                for batch in self._dataset:
                    yield self._converted(tf.nest.flatten(batch, expand_composites=True))
        except tf.errors.OpError as error:
            if self._dataset is not None:
                self._stream.raise_error()
            for each in ranges:
                self._explain(*each)
            raise batch_error(error, self._what, ranges, self.reader) from error

    def _fed(self, feed: Feed, mode: str, batch_size: int, joins: bool) -> Any:
        raw, what = self._stream.dataset, self.fed_by
        try:
            fed = self._call(feed, raw, str(mode), self.reader.metadata)
        except ModelFileError as error:
            raise ModelFileError(f"{error}\n{told_of(raw.element_spec, self.reader)}", error.user_traceback) from error
        if not isinstance(fed, tf.data.Dataset):
            raise ModelFileError(f"{what} returned {type(fed).__name__}; expected a tf.data.Dataset.")
        check_feed(raw, fed, what)
        self.keeps_order = keeps_order(raw, fed)
        if self.keeps_order or not joins:
            return batched(raw, fed, batch_size)
        # A preceding `map` would be fused with the batch, which would then allocate memory for _ALL examples.
        options = tf.data.Options()
        options.experimental_optimization.map_and_batch_fusion = False
        return batched(raw, fed, _ALL).with_options(options)

    def _traced_feed_batch(
        self, feed_batch: FeedBatch, mode: str, converted: bool, class_weight: Mapping[int, float] | None
    ) -> QuickCall:
        metadata, what, spec, mode = self.reader.metadata, self._what, self.element_spec, str(mode)
        weigh = keras_data.class_weights(class_weight)
        refused: list[ModelFileError] = []  # AutoGraph would replace the error

        @not_converted
        def checked(result: Any, records: Any) -> Any:
            try:
                return weigh(_as_elements(result, records, mode, what))
            except ModelFileError as error:
                refused.append(error)
                raise

        def to_batch(*tensors: Any) -> Any:
            records = tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)
            return checked(feed_batch(records, mode, metadata), records)

        def traced() -> QuickCall:
            return quick_call(to_batch, tf.nest.flatten(spec, expand_composites=True), autograph=converted)

        traced.__name__ = getattr(feed_batch, "__name__", "feed_batch") if converted else "the columns"
        try:
            call: QuickCall = self._call(traced)
        except ModelFileError as error:
            if refused:
                raise refused[0] from None
            told = told_of(spec, self.reader, batches=True)
            raise ModelFileError(f"{error}\n{told}", error.user_traceback) from error
        return call


def _as_elements(result: Any, records: Any, mode: str, what: str) -> Any:
    """The tensors of `result`, as `tf.data` makes them. Raises `ModelFileError` unless it may be a batch; checks in
    each batch that its parts have as many rows as there are records."""
    expected = "features" if mode == Mode.PREDICTION else "a tuple (features, labels) or (features, labels, weights)"
    if result is None or isinstance(result, (list, tf.data.Dataset)):
        raise ModelFileError(f"{what} returned {type(result).__name__}; expected {expected} of the whole batch.")
    given = _rows(tf.nest.flatten(records)[0])

    def element(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return {key: element((*path, key), part) for key, part in leaf.items()}
        if isinstance(leaf, tuple):
            items = [element((*path, place), part) for place, part in enumerate(leaf)]
            return type(leaf)(*items) if hasattr(leaf, "_fields") else tuple(items)
        if leaf is None:
            return None
        name = _name_of(path, mode)
        try:
            leaf = leaf if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) else tf.convert_to_tensor(leaf)
        except (TypeError, ValueError) as error:
            raise ModelFileError(
                f"{what} returned {leaf!r} of type {type(leaf).__name__} as {name}; expected tensors, in {expected}."
            ) from error
        if leaf.shape.rank == 0:
            raise ModelFileError(
                f"{what} returned a single value as {name}; expected a tensor with one row per record of the batch."
            )
        text = f"{what} returned {name} with a number of rows that differs from that of the records:"
        tf.debugging.Assert(_rows(leaf) == given, [text, _rows(leaf), "and", given])
        return leaf

    return element((), result)


def _rows(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]


def _name_of(path: tuple[Any, ...], mode: str) -> str:
    if mode == Mode.PREDICTION or not path or not isinstance(path[0], int) or path[0] >= len(_PARTS):
        return "".join(["features", *(f"[{key!r}]" for key in path)])
    return "".join([_PARTS[path[0]], *(f"[{key!r}]" for key in path[1:])])


# What a `feed` must not do, by TensorFlow's name of the dataset. Each task creates a new iterator.
_REFUSED = {
    "IgnoreErrors": (
        "ignores errors, so an unreadable file would be retried forever. Remove `ignore_errors`, and `filter` "
        "unwanted records"
    ),
    "CacheDataset": "caches, so every later task would get the records of the first one. Remove `cache`",
    "RepeatDataset": (
        "repeats, but a task must end with its last record; use the number of epochs to repeat. Remove `repeat`"
    ),
    "BatchDataset": (
        "batches, but ElasticCB batches the records itself. Remove `batch`, and convert whole batches in "
        "`feed_batch(records, mode, metadata)`; or end with `unbatch`"
    ),
}
_ONE_TO_ONE = ("MapDataset", "PrefetchDataset", "OptionsDataset")


def check_feed(raw: Any, fed: Any, what: str) -> None:
    """Raises `ModelFileError` if `what`, a feed, breaks the accounting of records."""
    if all(step is not raw for step in _steps(raw, fed)):
        raise ModelFileError(
            f"{what} returns a dataset that is not derived from its argument, so every task would have the same "
            "records. Return dataset.map(...), for example."
        )
    unbatches = False
    for step in _steps(raw, fed):
        kind = type(step).__name__
        unbatches = unbatches or "Unbatch" in kind or "FlatMap" in kind
        for name, why in _REFUSED.items():
            if name in kind and not (name == "BatchDataset" and unbatches):
                raise ModelFileError(f"{what} {why}.")


def told_of(spec: Any, reader: Reader, batches: bool = False) -> str:
    """Describes the input of a feed: single records of a reader, or batches of them."""
    record = keras.tree.map_structure(lambda spec: f"{spec.dtype.name} {list(spec.shape)}", spec)
    lines = " (a line of text, or the bytes of a record)" if record == "string []" else ""
    lines = " (lines of text, or the bytes of records)" if record == "string [None]" else lines
    given = "Its records are" if batches else "Each record of its input dataset is"
    return f"{given} {record}{lines}. {reader.told_of()}".rstrip()


def keeps_order(raw: Any, fed: Any) -> bool:
    """Whether `fed` always has one example per record of `raw`, in the same order.

    True only for chains of maps and similar steps.
    """
    steps = [step for step in _steps(raw, fed) if step is not raw]
    if fed.options().deterministic is False or any(getattr(s, "_deterministic", "") == "false" for s in steps):
        return False  # `map(..., num_parallel_calls=…, deterministic=False)`
    kinds = [type(step).__name__ for step in steps]
    return all("FlatMap" not in kind and any(name in kind for name in _ONE_TO_ONE) for kind in kinds)


def batched(raw: Any, fed: Any, size: int) -> Any:
    """Batches of the examples of `fed`. If the reader has lists of varying length, so have the batches."""
    is_ragged = any(hasattr(spec, "ragged_rank") for spec in flatten(raw.element_spec, raw.element_spec))
    return fed.ragged_batch(size) if is_ragged else fed.batch(size)


def batch_error(error: Any, what: str, ranges: Sequence[tuple[str, int, int]], reader: Reader) -> DataError:
    """The error for ranges of records that `what`, a feed, can't convert to batches.

    Has TensorFlow's message without names of nodes and operations, and advice if there is any. There is no traceback,
    because a pipeline runs outside of Python.
    """
    message = re.sub(r"\[?\[?\{\{.*?\}\}\]?\]?\s*|\s*\[Op:\w+\]( name:\s*\S*)?", "", error.message)
    message = re.sub(r"^Error in user-defined function .*?Iterator::Root\S*: ", "", message, flags=re.DOTALL)
    message = _WHERE_IN_GRAPH.sub("", message)
    failed = re.match(r"assertion failed: \[(.*)\]", message)
    if failed:
        message = failed[1].replace("] [", " ").replace("\\'", "'")
    message = message.strip(" .\n\t") + "."
    if "different shapes" in error.message or "add tensor to the batch" in error.message:
        message += (
            " All examples of `feed` must have the same shape. Pad them, or end `feed` with "
            "`dataset.ragged_batch(1).unbatch()` to get ragged batches."
        )
    of_columns = re.search(r"Field \d+ in record .* is not a valid|Expect \d+ fields but have", message)
    if of_columns and any(start == 0 for _, start, _ in ranges):
        message = f"{message} {reader.told_of()}".rstrip()
    names = ", ".join(f"[{start}, {end}) of {name}" for name, start, end in ranges[:3])
    more = f" and {len(ranges) - 3} more ranges" if len(ranges) > 3 else ""
    return DataError(f"Records {names}{more} can't be converted to batches by {what}: {message}")


def _steps(raw: Any, fed: Any) -> Iterator[Any]:
    """The steps that `feed` applied to `raw`, from the last step back to `raw`."""
    pending = [fed]
    while pending:
        step = pending.pop()
        yield step
        if step is not raw:
            pending.extend(step._inputs())
