"""Records of a Kafka topic."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from elasticcb.data.extras import import_extra
from elasticcb.data.kafka_consumers import (
    ANSWER_SECONDS,
    BEGINNING,
    CONFIG_VARIABLE,
    END,
    Consumers,
    connection_settings,
    offsets_at,
    place,
)
from elasticcb.data.reader import specs_of_columns
from elasticcb.data.record_formats import STRING, missing_value
from elasticcb.data.stacking import CHUNK_RECORDS, object_array, unstacked
from elasticcb.data.unbounded import Partition, UnboundedSource
from elasticcb.errors import DataError, StreamError, UsageError

_LATE_SECONDS = 5.0  # after a time to stop at, for messages on their way


class Kafka(UnboundedSource):
    """The messages of a Kafka topic. A record is a dict: "value" and "key" are strings, "timestamp" is int64, in
    milliseconds since the epoch, and "header:NAME" is a string for each name in `headers`; what a message lacks is
    "". With `columns`, values are JSON objects, and a record has these columns instead.

    Args:
        servers: "HOST:PORT", or several joined by commas.
        topic: its name.
        start: where a new job begins: "earliest", "latest", or a time (ISO 8601 text, or seconds since the epoch).
            A resumed job continues where it was; partitions that are added later begin with their first record.
        stop: where the job ends: None: never; "latest": the records that are there when it begins; a time; or a number
            of records.
        columns: NumPy's dtype, or "string", of each column: `{"user": "int64", "clicked": "float32"}`.
        headers: names of the headers that a record has.
        group: the consumer group whose offsets show, to monitors of lag, what is trained. The job never reads them.
        config_file: a file with settings of librdkafka as lines `NAME=VALUE`, such as those of SASL and TLS; default:
            the one that the environment variable ELASTICCB_KAFKA_CONFIG names. It must be on each machine.

    Raises:
        UsageError: an argument is invalid.
        DataError: confluent-kafka is not installed, or the file can't be read.
    """

    has_times = True
    may_skip = True  # transactions and compaction leave offsets without a record

    def __init__(
        self,
        servers: str,
        topic: str,
        start: str | float = "earliest",
        stop: str | float | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        headers: Sequence[str] | str = (),
        group: str = "",
        config_file: str = "",
    ) -> None:
        self.servers, self.topic, self.group = servers, topic, group or f"elasticcb-{topic}"
        self._start = start if start in ("earliest", "latest") else _time_of("start", start)
        self.most: int | None = stop if isinstance(stop, int) and not isinstance(stop, bool) else None
        self._stop = stop if stop is None or stop == "latest" or self.most is not None else _time_of("stop", stop)
        if self.most is not None and self.most < 1:
            raise UsageError(f"stop={stop!r} of Kafka is invalid: a number of records must be at least 1.")
        self._columns = {name: _dtype_of(name, dtype) for name, dtype in (columns or {}).items()}
        self._headers = [headers] if isinstance(headers, str) else list(headers)
        connection_settings(config_file)  # an unreadable file is an error here
        self._consumers = Consumers(servers, topic, self.group, config_file)
        self._starts: dict[str, int] = {}  # where partitions began that are not known yet

    @classmethod
    def of_url(cls, url: str, **params: Any) -> Kafka:
        """The source of kafka://HOST:PORT[,HOST:PORT…]/TOPIC. Raises `UsageError`."""
        parts = urlsplit(url)
        topic = parts.path.strip("/")
        if not parts.netloc or not topic or "/" in topic or parts.query:
            raise UsageError(
                f"{url} names no topic of Kafka. Expected kafka://HOST:PORT/TOPIC, with several servers "
                "kafka://HOST:PORT,HOST:PORT/TOPIC."
            )
        if "@" in parts.netloc:
            raise UsageError(
                "The address of Kafka has a user name or a password. Put them into the file that the environment "
                f"variable {CONFIG_VARIABLE} names."
            )
        return cls(parts.netloc, topic, **params)

    def __repr__(self) -> str:
        return f"Kafka({self.servers!r}, {self.topic!r})"

    # ------------------------------------------------------------ records

    @property
    def element_spec(self) -> Any:
        if self._columns:
            found = {name: object if dtype == STRING else dtype for name, dtype in self._columns.items()}
        else:
            texts = ["value", "key", *(f"header:{name}" for name in self._headers)]
            found = {**dict.fromkeys(texts, object), "timestamp": "int64"}
        return specs_of_columns({name: (np.dtype(dtype), ()) for name, dtype in found.items()})

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        return unstacked(self.read_chunks(name, start, end), self.element_spec)

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        with self._consumers.reading(name, start) as reading:
            for messages in reading.chunks(end, size):
                yield self._chunk(name, messages)

    def as_it_came(self, name: str, number: int) -> bytes:
        with self._consumers.reading(name, number) as reading:
            chunks = reading.chunks(number + 1, 1)
            return next((message.value() or b"" for chunk in chunks for message in chunk), b"")

    def _chunk(self, name: str, messages: list[Any]) -> dict[str, Any]:
        values = [message.value() or b"" for message in messages]
        if self._columns:
            return self._parsed(name, values, messages)
        keys = [message.key() or b"" for message in messages]
        chunk: dict[str, Any] = {"value": object_array(values), "key": object_array(keys)}
        for header in self._headers:
            found = [dict(message.headers() or ()).get(header) or b"" for message in messages]
            chunk[f"header:{header}"] = object_array(found)
        chunk["timestamp"] = np.array([message.timestamp()[1] for message in messages], np.int64)
        return chunk

    def _parsed(self, name: str, values: Sequence[bytes], messages: Sequence[Any]) -> dict[str, Any]:
        pyarrow = import_extra("pyarrow", "parquet", "JSON")
        reading = import_extra("pyarrow.json", "parquet", "JSON")
        kinds = {name: pyarrow.type_for_alias(dtype) for name, dtype in self._columns.items()}
        options = reading.ParseOptions(explicit_schema=pyarrow.schema(kinds), unexpected_field_behavior="ignore")
        texts = [value.replace(b"\n", b" ").strip() for value in values]
        lines = io.BytesIO(b"\n".join(texts))
        try:
            # A sole null would crash pyarrow. Where each line begins and ends like an object, each has one at least.
            if not all(text.startswith(b"{") and text.endswith(b"}") for text in texts):
                raise DataError("it is not an object")
            table = reading.read_json(lines, reading.ReadOptions(use_threads=False, block_size=1 << 30), options)
            if table.num_rows != len(values):
                raise DataError("it has several objects")
            return {name: self._column(name, table.column(name)) for name in self._columns}
        except (pyarrow.ArrowException, DataError) as error:
            if len(values) > 1:
                for value, message in zip(values, messages, strict=True):  # the first bad one raises
                    self._parsed(name, [value], [message])
            shown = values[0][:200].decode(errors="replace")
            raise DataError(
                f"The message at offset {messages[0].offset()} of {name} is not a JSON object with the columns "
                f"{', '.join(f'{each} ({dtype})' for each, dtype in self._columns.items())}: {error}. It is {shown!r}."
            ) from error

    def _column(self, name: str, column: Any) -> Any:
        dtype = self._columns[name]
        if column.null_count:
            missing = missing_value(dtype)
            if missing is None:
                raise DataError(f"{name} is missing or null, and {dtype} has no value for that")
            column = column.fill_null(missing)
        values = column.to_numpy()
        return object_array([value.encode() for value in values]) if dtype == STRING else values

    def beginning(self, records: int) -> tuple[str, int, int]:
        while True:
            partitions = self.partitions(())
            for name, found in partitions.items():
                if found.end > found.first:
                    return name, found.first, min(found.first + records, found.end)
            if all(found.stop is not None and found.stop <= found.start for found in partitions.values()):
                raise DataError(f"{self} has no record, and the job ends with those that are there (`stop`).")
            if self._consumers.are_closed_within(0.5):
                raise DataError(f"{self} was closed before it had a record.")

    # ------------------------------------------------------------ offsets

    def partitions(self, known: Collection[str]) -> Mapping[str, Partition]:
        with self._consumers.asking("its offsets") as consumer:
            topic = consumer.list_topics(self.topic, timeout=ANSWER_SECONDS).topics[self.topic]
            if topic.error is not None or not topic.partitions:
                why = "it has no partitions" if topic.error is None else topic.error.str()
                raise StreamError(f"{self.servers} has no topic {self.topic!r} ({why}). Create it.")
            found, topic_id = {}, self._consumers.topic_id() if known else ""
            names = [f"{self.topic}/{number}" for number in sorted(topic.partitions)]
            beginnings, ends = offsets_at(consumer, names, BEGINNING), offsets_at(consumer, names, END)
            for name in names:
                first, end = beginnings[name], ends[name]
                if min(first, end) < 0:
                    raise StreamError(f"{self.servers} does not answer for the offsets of {name}.")
                is_later = bool(known) and name not in known
                from_first = name in known or is_later or self._start == "earliest"
                if not from_first and name not in self._starts:  # it counts when we look first, not when all is built
                    offset = None if self._start == "latest" else _first_from(consumer, name, float(self._start))
                    self._starts[name] = end if offset is None else offset
                start = first if from_first else self._starts[name]
                stop = None if self._stop is None else self._stop_of(consumer, name, start if is_later else end)
                found[name] = Partition(max(start, first), first, end, stop, topic_id)
            return found

    def _stop_of(self, consumer: Any, name: str, end: int) -> int | None:
        if self._stop == "latest":
            return end
        late = time.time() - float(self._stop or 0)
        if self.most is not None or late < 0:
            return None  # not known yet
        found = _first_from(consumer, name, float(self._stop or 0))
        return end if found is None and late >= _LATE_SECONDS else found

    def offset_at(self, name: str, time: float) -> int | None:
        with self._consumers.asking("an offset") as consumer:
            return _first_from(consumer, name, time)

    def time_of(self, name: str, offset: int) -> float:
        with self._consumers.asking("a record") as consumer:
            consumer.assign([place(name, offset)])
            message = consumer.poll(ANSWER_SECONDS)
            consumer.unassign()
        if message is None:
            raise StreamError(f"{self.servers} does not answer for a record of {name}.")
        return max(float(message.timestamp()[1]), 0.0) / 1000 if message.error() is None else 0.0

    def trained(self, offsets: Mapping[str, int]) -> None:
        with self._consumers.asking("a commit") as consumer:
            # Nobody waits for it: it may take as long as no broker is the group's coordinator.
            consumer.commit(offsets=[place(*each) for each in offsets.items()], asynchronous=True)

    def close(self) -> None:
        self._consumers.close()
        self._starts.clear()


def _first_from(consumer: Any, name: str, time: float) -> int | None:
    found = offsets_at(consumer, [name], int(1000 * time))[name]
    return None if found < 0 else found


def _time_of(name: str, given: Any) -> float:
    """Seconds since the epoch. Raises `UsageError`."""
    try:
        if isinstance(given, str):
            when = datetime.fromisoformat(given.replace("Z", "+00:00"))
            return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
        if math.isfinite(given):
            return float(given)
        raise ValueError("no time")
    except (TypeError, ValueError):
        more = ", or a number of records" if name == "stop" else ""
        others = '"latest"' if name == "stop" else '"earliest", "latest"'
        raise UsageError(
            f"{name}={given!r} of Kafka is invalid. Expected {others}, a time such as 2026-11-30T08:00:00Z, in UTC "
            f"without an offset{more}."
        ) from None


def _dtype_of(name: str, dtype: Any) -> str:
    try:
        found = str(dtype) if dtype == STRING else np.dtype(dtype).name
        if found in (STRING, "bool", "float32", "float64") or np.dtype(found).kind in "iu":
            return found
    except TypeError:
        pass
    raise UsageError(
        f"columns={{{name!r}: {dtype!r}}} of Kafka is invalid. Expected the name of a number dtype, such as float32, "
        "or string."
    )
