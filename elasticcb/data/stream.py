"""Connects a reader to `tf.data`: one dataset, each of whose iterators reads its own ranges."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.data.reader import Reader
from elasticcb.data.stacking import CHUNK_RECORDS, RaggedRows, flatten, in_batches, pack
from elasticcb.errors import DataError, ElasticCBError, SourceError

if TYPE_CHECKING:
    import tensorflow as tf

Range = tuple[str, int, int]  # source name, start, end

# Maximum number of open iterators: abandoned iterators are not reported.
_OPEN_ITERATORS = 64


class RecordStream:
    """A dataset of raw records, and the error that ended one of its iterators.

    Every new iterator of `dataset` calls `next_ranges()` once, when its first record is requested, and yields the
    records of these ranges. So the dataset is built, and `feed` applied, only once for all tasks.

    TensorFlow converts a reader's exception to its own error with a text; `error` keeps the original.
    """

    def __init__(self, reader: Reader, next_ranges: Callable[[], Sequence[Range]]) -> None:
        self.error: ElasticCBError | None = None  # of the iterator that failed last
        self._reader = reader
        self._next_ranges = next_ranges
        self._spec = reader.element_spec
        self._leaves = flatten(self._spec, self._spec)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Iterator[Any]] = OrderedDict()
        self.dataset = self._dataset()

    def raise_error(self) -> None:
        """Raises and clears `error`, if there is one."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _dataset(self) -> tf.data.Dataset:
        import tensorflow as tf

        components = [_components(leaf) for leaf in self._leaves]
        types = [tf.int64, *(part.dtype for parts in components for part in parts)]

        @not_converted
        def step(number: Any, _: Any) -> Any:
            number, *leaves = tf.numpy_function(self._next_chunk, [number], types, stateful=True)
            given = iter(leaves)
            found = [[tf.ensure_shape(next(given), part.shape) for part in parts] for parts in components]
            packed = [values[0] if len(values) == 1 else _ragged(*values) for values in found]
            return tf.ensure_shape(number, ()), pack(self._spec, iter(packed))

        @not_converted
        def is_not_the_end(*chunk: Any) -> Any:
            first = tf.nest.flatten(chunk)[0]
            return (first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]) > 0

        # The state of `scan` belongs to one iterator: the number of our generator. This does what `from_generator`
        # does, without its `flat_map`, which takes 10 ms for each new iterator. Chunks, not records, cross from Python
        # to TensorFlow; `unbatch` then runs in C++.
        forever = tf.data.Dataset.range(np.iinfo(np.int64).max)
        chunks = forever.scan(np.int64(-1), step).take_while(is_not_the_end)
        if all(leaf.shape.num_elements() for leaf in self._leaves):
            return chunks.unbatch()
        # TensorFlow 2.21 crashes in `unbatch` when a record has no elements: `from_tensors(zeros((1, 0)))`.
        return chunks.flat_map(not_converted(lambda *chunk: tf.data.Dataset.from_tensor_slices(as_one(chunk))))

    def _next_chunk(self, number: Any) -> list[Any]:
        """Takes the number of the generator (-1: a new one); returns it with the leaves of its next chunk."""
        with self._lock:
            if number < 0:
                number = np.int64(next(self._numbers))
                self._open[int(number)] = self._chunks()
                while len(self._open) > _OPEN_ITERATORS:
                    self._open.popitem(last=False)
            chunks = self._open.get(int(number))
        try:
            if chunks is None:
                raise DataError(
                    f"An iterator over records was closed because {_OPEN_ITERATORS} newer ones are open. Create a new "
                    "iterator."
                )
            # Copies: TensorFlow uses the memory of arrays of numbers, and may write the results of operations to it.
            return [number, *map(np.array, _flat(flatten(self._spec, next(chunks))))]
        except StopIteration:
            self._open.pop(int(number), None)
            return [number, *_flat(map(_empty, self._leaves))]
        except ElasticCBError as error:
            # Prefetching may read again after an error; this must neither look like the end nor hide the error.
            if not isinstance(chunks, _Failed):
                self.error = error
                self._open[int(number)] = _Failed(error)
            raise

    def _chunks(self) -> Iterator[Any]:
        try:
            for each in self._next_ranges():
                yield from read_range(self._reader, self._spec, each, CHUNK_RECORDS)
        except ElasticCBError:
            raise
        except Exception as error:
            raise _unreadable("The next range", error) from error


def read_batches(reader: Reader, spec: Any, ranges: Sequence[Range], size: int) -> Iterator[Any]:
    """Stacks of `size` records, as NumPy arrays and `RaggedRows`; the last one of a range may have fewer.

    Args:
      spec: the reader's `element_spec`.

    Raises `DataError`.
    """
    whole = size * max(CHUNK_RECORDS // size, 1)  # so that most need no copy
    for each in ranges:
        yield from in_batches(read_range(reader, spec, each, whole), spec, size)


def read_range(reader: Reader, spec: Any, given: Range, size: int) -> Iterator[Any]:
    """Chunks of up to `size` records. Raises `DataError`, also if there are fewer or more records than asked for."""
    (name, start, end), count = given, 0
    try:
        for chunk in reader.read_chunks(name, start, end, size):
            count += len(flatten(spec, chunk)[0])
            if count > end - start:
                break
            yield chunk
    except ElasticCBError:
        raise
    except Exception as error:
        raise _unreadable(f"Records [{start}, {end}) of {name}", error) from error
    if count > end - start or (count < end - start and not reader.may_skip):
        raise DataError(
            f"Records [{start}, {end}) of {name} were requested, but {type(reader).__name__} yielded "
            f"{'more' if count > end - start else count} records. Its sources() and read() must agree."
        )


def _unreadable(where: str, error: Exception) -> DataError:
    kind = SourceError if isinstance(error, OSError) else DataError
    return kind(f"{where} could not be read: {type(error).__name__}: {error}", user_traceback=traceback.format_exc())


def spec_of_batches(spec: Any) -> Any:
    """Of the tensors of a batch of records, any number of them."""
    import tensorflow as tf

    def of_batch(leaf: Any) -> Any:
        shape = None if leaf.shape.rank is None else [None, *leaf.shape]
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank + 1, tf.int64)
        return tf.TensorSpec(shape, leaf.dtype)

    return pack(spec, map(of_batch, flatten(spec, spec)))


def flat_tensors_of(spec: Any, batch: Any) -> list[Any]:
    """The tensors of a batch of NumPy arrays, in the order in which TensorFlow flattens `spec_of_batches(spec)`."""
    import tensorflow as tf

    leaves = ([*map(np.array, _flat([leaf]))] for leaf in flatten(spec, batch))  # copies: arrays may be the reader's
    return [tf.convert_to_tensor(part) for part in tf.nest.flatten(pack(spec, leaves))]


class _Failed:
    """Replaces a generator that raised."""

    def __init__(self, error: ElasticCBError) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise self._error


def not_converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a dataset function that does not branch on tensors. AutoGraph would need 0.1 s per process to find that
    out."""
    import tensorflow as tf

    marked: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return marked


def _components(leaf: Any) -> list[Any]:
    """The specs of the tensors that make up chunks of a leaf: one, or `RaggedRows.components`."""
    import tensorflow as tf

    if isinstance(leaf, tf.RaggedTensorSpec):
        values = tf.TensorSpec([None, *leaf.shape[leaf.ragged_rank + 1 :]], leaf.dtype)
        return [values, *[tf.TensorSpec([None], tf.int64)] * (leaf.ragged_rank + 1)]
    return [tf.TensorSpec(None if leaf.shape.rank is None else [None, *leaf.shape], leaf.dtype)]


def _ragged(values: Any, *splits: Any) -> Any:
    import tensorflow as tf

    return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)


def _flat(leaves: Iterable[Any]) -> list[Any]:
    return [part for leaf in leaves for part in (leaf.components if isinstance(leaf, RaggedRows) else [leaf])]


def _empty(leaf: Any) -> Any:
    if hasattr(leaf, "ragged_rank"):
        return RaggedRows.empty(leaf)
    rest = () if leaf.shape.rank is None else tuple(size or 0 for size in leaf.shape)
    return np.empty((0, *rest), leaf.dtype.as_numpy_dtype)


def as_one(chunk: tuple[Any, ...]) -> Any:
    """Packs the arguments that `tf.data` passes to a function into the original element."""
    return chunk[0] if len(chunk) == 1 else chunk
