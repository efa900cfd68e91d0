"""Records of a Kafka topic."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from elasticcb.data.extras import import_extra
from elasticcb.data.reader import specs_of_columns
from elasticcb.data.record_formats import STRING, missing_value
from elasticcb.data.stacking import CHUNK_BYTES, CHUNK_RECORDS
from elasticcb.data.unbounded import Partition, UnboundedSource
from elasticcb.errors import DataError, StreamError, UsageError

CONFIG_VARIABLE = "ELASTICCB_KAFKA_CONFIG"  # the file with settings of the connection, on each machine
_ANSWER_SECONDS = 10.0  # for one request to the brokers
_STILL_SECONDS = 0.2  # for one batch of messages
_IDLE_CONSUMERS = 8  # that a process keeps open
_LATE_SECONDS = 5.0  # after a time to stop at, for messages on their way
_DEFAULTS = {
    "client.id": "elasticcb",
    "queued.max.messages.kbytes": 16 << 10,  # of each consumer
    "fetch.queue.backoff.ms": 10,  # the library's 1000 ms are a pause whenever these are full
}
_OWN = ("group.id", "enable.auto.commit", "enable.partition.eof", "auto.offset.reset", "bootstrap.servers")


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
        self._config_file = config_file
        self._settings()  # an unreadable file is an error here
        self._lock = threading.Lock()
        self._idle: list[_Reading] = []
        self._monitor: Any = None  # the consumer that asks for offsets
        self._closed = threading.Event()

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

    def __getstate__(self) -> dict[str, Any]:
        given = {name: value for name, value in vars(self).items() if name not in ("_lock", "_closed")}
        return {**given, "_idle": [], "_monitor": None}  # connections belong to a process

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock, self._closed = threading.Lock(), threading.Event()

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
        for chunk in self.read_chunks(name, start, end):
            for row in zip(*chunk.values(), strict=True):
                yield dict(zip(chunk, row, strict=True))

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        reading = self._reading(name, start)
        try:
            yield from (self._chunk(name, messages) for messages in reading.chunks(end, size, self._closed))
        except BaseException:
            reading.consumer.close()
            raise
        with self._lock:
            self._idle.append(reading)
            closing = self._idle.pop(0) if len(self._idle) > _IDLE_CONSUMERS else None
        if closing is not None:
            closing.consumer.close()

    def as_it_came(self, name: str, number: int) -> bytes:
        reading = _Reading(self._consumer())
        try:
            reading.begin(name, number)
            chunks = reading.chunks(number + 1, 1, self._closed)
            return next((message.value() or b"" for chunk in chunks for message in chunk), b"")
        finally:
            reading.consumer.close()

    def _reading(self, name: str, start: int) -> _Reading:
        """A consumer that reads from this offset on; preferably one that is there already."""
        with self._lock:
            found = next((each for each in self._idle if (each.name, each.position) == (name, start)), None)
            if found is not None:
                self._idle.remove(found)
                return found
            free = self._idle.pop(0) if len(self._idle) == _IDLE_CONSUMERS else None
        reading = free or _Reading(self._consumer())
        reading.begin(name, start)
        return reading

    def _chunk(self, name: str, messages: list[Any]) -> dict[str, Any]:
        values = [message.value() or b"" for message in messages]
        if self._columns:
            return self._parsed(name, values, messages)
        chunk: dict[str, Any] = {"value": _texts(values), "key": _texts([message.key() or b"" for message in messages])}
        for header in self._headers:
            found = [dict(message.headers() or ()).get(header) or b"" for message in messages]
            chunk[f"header:{header}"] = _texts(found)
        chunk["timestamp"] = np.array([message.timestamp()[1] for message in messages], np.int64)
        return chunk

    def _parsed(self, name: str, values: Sequence[bytes], messages: Sequence[Any]) -> dict[str, Any]:
        pyarrow = import_extra("pyarrow", "parquet", "JSON")
        reading = import_extra("pyarrow.json", "parquet", "JSON")
        kinds = {name: pyarrow.type_for_alias(dtype) for name, dtype in self._columns.items()}
        options = reading.ParseOptions(explicit_schema=pyarrow.schema(kinds), unexpected_field_behavior="ignore")
        lines = io.BytesIO(b"\n".join(value.replace(b"\n", b" ") for value in values))
        try:
            table = reading.read_json(lines, reading.ReadOptions(use_threads=False, block_size=1 << 30), options)
            if table.num_rows != len(values):
                raise pyarrow.ArrowInvalid("a value is empty")
            return {name: self._column(name, table.column(name)) for name in self._columns}
        except (pyarrow.ArrowInvalid, DataError) as error:
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
        return _texts([value.encode() for value in values]) if dtype == STRING else values

    def beginning(self, records: int) -> tuple[str, int, int]:
        while True:
            for name, found in self.partitions(()).items():
                if found.end > found.first:
                    return name, found.first, min(found.first + records, found.end)
            if self._closed.wait(0.5):
                raise DataError(f"{self} was closed before it had a record.")

    # ------------------------------------------------------------ offsets

    def partitions(self, known: Collection[str]) -> Mapping[str, Partition]:
        from confluent_kafka import TopicPartition

        with self._asking("its offsets") as consumer:
            topic = consumer.list_topics(self.topic, timeout=_ANSWER_SECONDS).topics[self.topic]
            if topic.error is not None or not topic.partitions:
                why = "it has no partitions" if topic.error is None else topic.error.str()
                raise StreamError(f"{self.servers} has no topic {self.topic!r} ({why}). Create it.")
            found = {}
            for number in sorted(topic.partitions):
                name = f"{self.topic}/{number}"
                first, end = consumer.get_watermark_offsets(
                    TopicPartition(self.topic, number), timeout=_ANSWER_SECONDS, cached=False
                )
                is_later = bool(known) and name not in known
                from_first = is_later or self._start == "earliest"
                start = first if from_first else self._offset(consumer, number, self._start, end)
                stop = None if self._stop is None else self._stop_of(consumer, number, start if is_later else end)
                found[name] = Partition(max(start, first), first, end, stop)
            return found

    def _stop_of(self, consumer: Any, number: int, end: int) -> int | None:
        if self._stop == "latest":
            return end
        if self.most is not None or time.time() < float(self._stop or 0) + _LATE_SECONDS:
            return None  # not known yet
        return self._offset(consumer, number, self._stop, end)

    def _offset(self, consumer: Any, number: int, place: Any, end: int) -> int:
        """The offset of the first message from a time on; `end` if there is none, or for "latest"."""
        from confluent_kafka import TopicPartition

        if place == "latest":
            return end
        asked = TopicPartition(self.topic, number, int(1000 * place))
        offset = consumer.offsets_for_times([asked], timeout=_ANSWER_SECONDS)[0].offset
        return end if offset < 0 else offset

    def time_of(self, name: str, offset: int) -> float:
        from confluent_kafka import TopicPartition

        with self._asking("a record") as consumer:
            consumer.assign([TopicPartition(self.topic, int(name.rpartition("/")[2]), offset)])
            message = consumer.poll(_ANSWER_SECONDS)
            consumer.unassign()
        if message is None:
            raise StreamError(f"{self.servers} does not answer for a record of {name}.")
        return float(message.timestamp()[1]) / 1000 if message.error() is None else 0.0

    def trained(self, offsets: Mapping[str, int]) -> None:
        from confluent_kafka import TopicPartition

        places = [TopicPartition(self.topic, int(name.rpartition("/")[2]), offset) for name, offset in offsets.items()]
        with self._asking("a commit") as consumer:
            consumer.commit(offsets=places, asynchronous=False)

    @contextmanager
    def _asking(self, what: str) -> Iterator[Any]:
        """The consumer for requests besides records. Raises `StreamError` if they fail."""
        kafka = _library()
        if self._monitor is None:
            self._monitor = self._consumer()
        try:
            yield self._monitor
        except kafka.KafkaException as error:
            raise StreamError(f"{self.servers} does not answer for {what} of {self.topic}: {_told(error)}") from error

    def _settings(self) -> dict[str, Any]:
        path = self._config_file or os.environ.get(CONFIG_VARIABLE, "")
        return _read_settings(Path(path)) if path else {}

    def _consumer(self) -> Any:
        kafka = _library()
        own = {
            "bootstrap.servers": self.servers,
            "group.id": self.group,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "log_level": 2,
        }
        try:
            return kafka.Consumer({**_DEFAULTS, **self._settings(), **own})
        except kafka.KafkaException as error:
            raise DataError(f"The settings for Kafka are refused: {_told(error)}.") from error

    def close(self) -> None:
        closed, self._closed = self._closed, threading.Event()  # it may be used again
        closed.set()
        with self._lock:
            open_ones, self._idle = [each.consumer for each in self._idle], []
            monitor, self._monitor = self._monitor, None
        for consumer in [*open_ones, *([monitor] if monitor is not None else [])]:
            consumer.close()


class _Reading:
    """A consumer of one partition."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.name, self.position = "", 0

    def begin(self, name: str, start: int) -> None:
        from confluent_kafka import TopicPartition

        topic, _, number = name.rpartition("/")
        self.name, self.position = name, start
        self.consumer.assign([TopicPartition(topic, int(number), start)])

    def chunks(self, end: int, size: int, closed: threading.Event) -> Iterator[list[Any]]:
        """Lists of the messages before offset `end`; waits while the brokers are away. Raises `DataError`."""
        while self.position < end:
            taken = self.consumer.consume(min(size, end - self.position), _STILL_SECONDS)
            if taken and taken[-1].error() is None and taken[-1].offset() < end and _are_records(taken):
                self.position = taken[-1].offset() + 1
            else:
                taken = list(self._taken(taken, end))
            yield from _parts(taken)
            if closed.is_set():
                raise DataError(f"Reading {self.name} was stopped.")

    def _taken(self, messages: list[Any], end: int) -> Iterator[Any]:
        """The messages before offset `end`, among which may be news of the partition. Raises `DataError`."""
        from confluent_kafka import KafkaError

        for message in messages:
            error = message.error()
            if error is None:
                if message.offset() >= end:  # the offsets before it have no message
                    self.position, self.name = end, ""  # it can't continue from here: the message is taken
                    break
                self.position = message.offset() + 1
                yield message
            elif error.code() == KafkaError._PARTITION_EOF:
                self.position = max(self.position, min(message.offset(), end))
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise DataError(
                    f"Offset {self.position} of {self.name} is not there any more: {error.str()}. Its retention is "
                    "shorter than the job's lag."
                )
            elif error.fatal() or (not error.retriable() and error.code() > 0):
                raise DataError(f"{self.name} can't be read from offset {self.position}: {error.str()}.")


def _are_records(messages: list[Any]) -> bool:
    return not any([message.error() for message in messages])  # noqa: C419, as a list twice as fast


def _parts(messages: list[Any]) -> Iterator[list[Any]]:
    """Messages in lists of few bytes."""
    if messages:
        step = max(1, len(messages) * CHUNK_BYTES // max(sum(map(len, messages)), 1))
        yield from (messages[place : place + step] for place in range(0, len(messages), step))


def _library() -> Any:
    return import_extra("confluent_kafka", "kafka", "Kafka")


def _told(error: Any) -> str:
    first = error.args[0] if error.args else error
    return str(first.str() if hasattr(first, "str") else first)


def _texts(values: Sequence[bytes]) -> Any:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _time_of(name: str, given: Any) -> float:
    """Seconds since the epoch. Raises `UsageError`."""
    try:
        if isinstance(given, str):
            when = datetime.fromisoformat(given.replace("Z", "+00:00"))
            return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
        return float(given)
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
        if found == STRING or np.dtype(found).kind in "iufb":
            return found
    except TypeError:
        pass
    raise UsageError(
        f"columns={{{name!r}: {dtype!r}}} of Kafka is invalid. Expected the name of a number dtype, such as float32, "
        "or string."
    )


def _read_settings(path: Path) -> dict[str, str]:
    """Lines NAME=VALUE; empty lines and those that begin with # are left out. Raises `DataError`, without values."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The settings of Kafka in {path} can't be read: {error}.") from error
    found = {}
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        name = name.strip()
        if not name or name.startswith("#"):
            continue
        if not equals:
            raise DataError(f"{path}, line {number}, is not NAME=VALUE.")
        if name in _OWN:
            raise DataError(f"{path}, line {number}: {name} is set by the job. Remove the line.")
        found[name] = value.strip()
    return found
