"""Batches of the records of a reader: `feed` maps single records, `feed_batch` maps batches; without them, the columns
of the data become features and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.columns import columns_of, named_feed
from elasticcb.data.feeds import batch_error, batched, check_feed, keeps_order, told_of
from elasticcb.data.reader import Reader
from elasticcb.data.stream import Range, RecordStream, as_one, not_converted
from elasticcb.errors import ModelFileError
from elasticcb.settings import Mode

if TYPE_CHECKING:
    from elasticcb.data.reader import Feed, FeedBatch

_ALL = 1 << 31  # number of examples in a batch: all
_PARTS = ("features", "labels", "sample weights")


class RecordBatches:
    """Batches of the records of ranges; the functions of the user are traced once.

    Args:
      mode: the second argument of the user's functions.
      feed: from a dataset of single records to one of examples, or of records for `feed_batch`.
      feed_batch: from the records of a batch to the batch that the model gets. Without both, the reader's default feed,
        or its columns.
      label: the column of labels; only without `feed` and `feed_batch`.
      call: calls a function of the user; its errors become `ModelFileError`s.
      name: how messages name a function of the user: `"feed"`, `"feed_batch"`.
      owner: what lacks a feed, for messages.
      joins: if `feed` drops or multiplies records, make one batch of all examples of a range.

    Attributes:
      keeps_order: whether the n-th example is made of the n-th record.
      dataset: the batches; each of its iterators reads `ranges`.

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
        call: Callable[..., Any],
        name: Callable[[str], str],
        owner: str,
        joins: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        self.reader = reader
        self.keeps_order = True
        self.ranges: Sequence[Range] = ()
        self._explain: Callable[..., Any] = lambda *_: None
        self._what = name("feed_batch" if feed_batch else "feed")
        converted = feed_batch is not None
        if feed is None and feed_batch is None:
            feed = reader.default_feed()
        if label and (feed or feed_batch):
            raise ModelFileError(
                f"The label {label!r} is for data without a feed, but there is {self._what}. Remove one of them."
            )
        if feed is None and feed_batch is None:
            columns = columns_of(reader)
            if columns is None:
                raise ModelFileError(
                    f"{owner} has no `feed_batch(records, mode, metadata)` and no `feed`, and the columns of the "
                    f"records are not known.{reader.unknown_columns} Otherwise, define a feed that converts records "
                    "to (features, labels)."
                )
            feed_batch, self._explain = named_feed(columns, label), columns.explain
            self._what = "its columns"
        self._stream = RecordStream(reader, lambda: self.ranges, 0 if feed else batch_size)
        dataset = self._stream.dataset
        if feed is not None:
            dataset = self._fed(feed, mode, batch_size, call, name, joins)
        if feed_batch is not None:
            dataset = self._fed_batches(dataset, feed_batch, mode, call, converted)
        self.dataset = keras_data.weighted(dataset, class_weight).prefetch(2)

    def batches(self, ranges: Sequence[Range]) -> Iterator[Any]:
        """Yields the batches of the ranges. With `feed`, a batch may span two if the first one is not made of whole
        batches. Raises the reader's errors."""
        self.ranges = ranges
        try:
            yield from self.dataset
        except tf.errors.OpError as error:
            self._stream.raise_error()
            for each in ranges:
                self._explain(*each)
            raise batch_error(error, self._what, ranges, self.reader) from error

    def _fed(
        self,
        feed: Feed,
        mode: str,
        batch_size: int,
        call: Callable[..., Any],
        name: Callable[[str], str],
        joins: bool,
    ) -> Any:
        raw, what = self._stream.dataset, name("feed")
        try:
            fed = call(feed, raw, str(mode), self.reader.metadata)
        except ModelFileError as error:
            raise ModelFileError(f"{error}\n{told_of(raw, self.reader)}", error.user_traceback) from error
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

    def _fed_batches(
        self, raw: Any, feed_batch: FeedBatch, mode: str, call: Callable[..., Any], converted: bool
    ) -> Any:
        metadata, what, mode = self.reader.metadata, self._what, str(mode)
        refused: list[ModelFileError] = []  # AutoGraph would replace the error

        @not_converted
        def checked(result: Any, records: Any) -> Any:
            try:
                _check_rows(result, records, mode, what)
            except ModelFileError as error:
                refused.append(error)
                raise
            return result

        def to_batch(*given: Any) -> Any:
            records = as_one(given)
            return checked(feed_batch(records, mode, metadata), records)

        def mapped() -> Any:
            return raw.map(to_batch if converted else not_converted(to_batch))

        mapped.__name__ = getattr(feed_batch, "__name__", "feed_batch") if converted else "the columns"
        try:
            return call(mapped)
        except ModelFileError as error:
            if refused:
                raise refused[0] from None
            raise ModelFileError(f"{error}\n{told_of(raw, self.reader, batches=True)}", error.user_traceback) from error


def _check_rows(result: Any, records: Any, mode: str, what: str) -> None:
    """Raises `ModelFileError` unless `result` may be a batch; checks in each batch that its parts have as many rows as
    there are records."""
    expected = "features" if mode == Mode.PREDICTION else "a tuple (features, labels) or (features, labels, weights)"
    if result is None or isinstance(result, (list, tf.data.Dataset)):
        raise ModelFileError(f"{what} returned {type(result).__name__}; expected {expected} of the whole batch.")
    given = _rows(tf.nest.flatten(records)[0])
    for path, leaf in keras.tree.flatten_with_path(result):
        if leaf is None:
            continue
        name = _name_of(path, mode)
        try:
            leaf = leaf if hasattr(leaf, "shape") else tf.convert_to_tensor(leaf)
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
