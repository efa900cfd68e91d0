"""The interface of data readers: named sources of records, read by ranges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticcb.data.stacking import CHUNK_RECORDS, stack_records
from elasticcb.errors import DataError
from elasticcb.process.wording import how_many

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

    from elasticcb.data.record_formats import RecordFormat

    Feed = Callable[[tf.data.Dataset, str, "Metadata"], tf.data.Dataset]
    FeedBatch = Callable[[Any, str, "Metadata"], Any]  # of the records of a batch, in the structure of `element_spec`

    # By name, of one record. The first dimensions may be None: their length varies.
    Columns = Mapping[str, tuple[np.dtype[Any], tuple[int | None, ...]]]


@dataclass(frozen=True)
class Metadata:
    """A reader's information about its records; the third argument of `feed` and `feed_batch`."""

    column_names: tuple[str, ...] = ()
    column_dtypes: Mapping[str, str] = field(default_factory=dict)  # by column name, NumPy's names
    extra: Mapping[str, Any] = field(default_factory=dict)  # specific to the reader


@dataclass(frozen=True)
class Source:
    """One file or array, with the records `[0, count)` of `name`."""

    name: str
    count: int


class Reader(ABC):
    """Records in named sources, read by ranges.

    The master calls `sources` and splits them into tasks; workers call `read_chunks` with the ranges of tasks, from
    several threads at once. Both create their own reader with the same arguments, so names and counts must not depend
    on the process.
    """

    @abstractmethod
    def sources(self) -> list[Source]:
        """All sources, in a fixed order. May scan the data; the readers here do this once and cache the result."""

    @abstractmethod
    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        """Yields the records `[start, end)` of source `name`, in the structure of `element_spec`."""

    @property
    def element_spec(self) -> Any:
        """The `tf.TensorSpec` of one record, or dicts and tuples of them. Default: scalar string."""
        import tensorflow as tf

        return tf.TensorSpec((), tf.string)

    @property
    def metadata(self) -> Metadata:
        """The third argument of `feed` and `feed_batch`."""
        return Metadata()

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        """Yields the same records as `read`, as structures of NumPy arrays of shape `(n, ...)`, 1 <= n <= `size`, fewer
        if records are large.

        Strings are arrays of `bytes` objects. Raises `DataError` for a record that does not match `element_spec`, with
        its source and number.
        """
        return stack_records(self.read(name, start, end), self.element_spec, name, start, size)

    def as_it_came(self, name: str, number: int) -> bytes:
        """A record, for people who look for what is wrong with it."""
        record = next(iter(self.read(name, number, number + 1)))
        return record if isinstance(record, bytes) else repr(record).encode()

    def told_of(self) -> str:
        """What a person needs to know of the records when a feed fails: the names of the columns, if there are any."""
        names = getattr(self.metadata, "column_names", ())  # a user's own reader may have other metadata
        return f"The columns are: {', '.join(names)}." if names else ""

    def default_feed(self) -> Feed | None:
        """The feed for model files without one; None: columns become features and labels."""
        return None

    may_skip = False  # whether a range may have fewer records than numbers
    may_lack = ""  # a column that reader parameters name and the data may lack: the label, in prediction
    unknown_columns = ""  # for messages: why `record_format` is None, and what to do

    def record_format(self) -> RecordFormat | None:
        """How records that are strings hold columns; None: they don't, or the columns are unknown."""
        return None


def specs_of_columns(columns: Columns) -> dict[str, tf.TypeSpec]:
    """The `element_spec` of records of these columns; NumPy's strings and objects are strings."""
    import tensorflow as tf

    def spec(dtype: Any, shape: tuple[int | None, ...]) -> tf.TypeSpec:
        kind = tf.as_dtype(tf.string if dtype.kind in "OSU" else dtype.newbyteorder("="))
        ragged = shape.count(None)
        return tf.RaggedTensorSpec(shape, kind, ragged - 1, tf.int64) if ragged else tf.TensorSpec(shape, kind)

    return {name: spec(*column) for name, column in columns.items()}


def checked_sources(reader: Reader) -> list[Source]:
    """Calls `reader.sources()` and checks the result.

    Raises:
      DataError: there are no records, a name occurs twice, or the result is not a list of `Source`.
    """
    sources = list(reader.sources())
    names: set[str] = set()
    for source in sources:
        if not isinstance(source, Source) or source.count < 0:
            raise DataError(
                f"{type(reader).__name__}.sources() returned {source!r}. Expected a list of "
                "elasticcb.data.Source(name, count), with a count of at least 0."
            )
        if source.name in names:
            raise DataError(
                f"{type(reader).__name__}.sources() contains {source.name!r} twice. Give each source a unique name, "
                "because tasks refer to it."
            )
        names.add(source.name)
    if not any(source.count for source in sources):
        raise DataError(
            f"{type(reader).__name__} found no records in {how_many(len(sources), 'source')}. Provide at least "
            "one record."
        )
    return sources


def check_range(name: str, start: int, end: int, count: int) -> None:
    """Raises `DataError` unless `[start, end)` is within the `count` records of source `name`."""
    if not 0 <= start <= end <= count:
        raise DataError(
            f"Records [{start}, {end}) of {name} were requested, but it has {count}. If it was changed while the job "
            "ran, start the job again."
        )
