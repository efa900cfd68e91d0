"""The connections of a process to the brokers of Kafka."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticcb.data.extras import import_extra
from elasticcb.data.stacking import CHUNK_BYTES
from elasticcb.errors import DataError, StreamError

CONFIG_VARIABLE = "ELASTICCB_KAFKA_CONFIG"  # the file with settings of the connection, on each machine
ANSWER_SECONDS = 10.0  # for one request to the brokers
_FIRST_ANSWER_SECONDS = 1.0  # for the topic's id
_STILL_SECONDS = 0.2  # for one batch of messages
BEGINNING, END = -2, -1  # of a partition, as times of `offsets_at`
_IDLE_CONSUMERS = 8  # that a process keeps open
_DEFAULTS = {
    "client.id": "elasticcb",
    "queued.max.messages.kbytes": 16 << 10,  # of each consumer
    "fetch.queue.backoff.ms": 10,  # the library's 1000 ms are a pause whenever these are full
}
_OWN = ("group.id", "enable.auto.commit", "enable.partition.eof", "auto.offset.reset", "bootstrap.servers")


class Consumers:
    """Consumers that read partitions, some of which are kept for what follows, and one for other requests. Pickled
    without them; can be used again after `close`."""

    def __init__(self, servers: str, topic: str, group: str, config_file: str) -> None:
        self._servers, self._topic, self._group, self._config_file = servers, topic, group, config_file
        self._lock = threading.Lock()
        self._idle: list[_Reading] = []
        self._monitor: Any = None
        self._admin: Any = None
        self._described: Any = None  # a future of what `_admin` was asked last
        self._topic_id = ""
        self._closed = threading.Event()

    def __reduce__(self) -> Any:
        return Consumers, (self._servers, self._topic, self._group, self._config_file)

    @contextmanager
    def reading(self, name: str, start: int) -> Iterator[_Reading]:
        """A consumer that reads from this offset on; preferably one that is there already."""
        reading = self._begun(name, start)
        try:
            yield reading
        except BaseException:
            reading.consumer.close()
            raise
        with self._lock:
            self._idle.append(reading)
            closing = self._idle.pop(0) if len(self._idle) > _IDLE_CONSUMERS else None
        if closing is not None:
            closing.consumer.close()

    def _begun(self, name: str, start: int) -> _Reading:
        with self._lock:
            found = next((each for each in self._idle if (each.name, each.position) == (name, start)), None)
            if found is not None:
                self._idle.remove(found)
                return found
            free = self._idle.pop(0) if len(self._idle) == _IDLE_CONSUMERS else None
        reading = free or _Reading(self._consumer(), self._closed)
        reading.begin(name, start)
        return reading

    @contextmanager
    def asking(self, what: str) -> Iterator[Any]:
        """The consumer for requests besides records. Raises `StreamError` if they fail."""
        kafka = _library()
        if self._monitor is None:
            self._monitor = self._consumer()
        try:
            yield self._monitor
        except kafka.KafkaException as error:
            raise StreamError(f"{self._servers} does not answer for {what} of {self._topic}: {_told(error)}") from error

    def topic_id(self) -> str:
        """The topic's id, as the brokers told it last; "": not yet. Only the first call waits: old ones tell none."""
        if self._described is None:
            self._described = self._asked_for_topic()
            futures.wait([self._described], _FIRST_ANSWER_SECONDS)
        if self._described.done():
            if self._described.exception() is None:
                found = self._described.result().topic_id
                self._topic_id = str(found) if found.get_most_significant_bits() else ""  # 0: there are none
            self._described = self._asked_for_topic()
        return self._topic_id

    def _asked_for_topic(self) -> Any:
        """A future."""
        if self._admin is None:
            library = import_extra("confluent_kafka.admin", "kafka", "Kafka")
            own = {"bootstrap.servers": self._servers, "log_level": 2}
            self._admin = library.AdminClient({**connection_settings(self._config_file), **own})
        topics = _library().TopicCollection([self._topic])
        return self._admin.describe_topics(topics, request_timeout=ANSWER_SECONDS)[self._topic]

    def _consumer(self) -> Any:
        kafka = _library()
        own = {
            "bootstrap.servers": self._servers,
            "group.id": self._group,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "log_level": 2,
        }
        try:
            return kafka.Consumer({**_DEFAULTS, **connection_settings(self._config_file), **own})
        except kafka.KafkaException as error:
            raise DataError(f"The settings for Kafka are refused: {_told(error)}.") from error

    def are_closed_within(self, seconds: float) -> bool:
        return self._closed.wait(seconds)

    def close(self) -> None:
        closed, self._closed = self._closed, threading.Event()
        closed.set()
        with self._lock:
            open_ones, self._idle = [each.consumer for each in self._idle], []
            monitor, self._monitor = self._monitor, None
        self._admin = self._described = None
        self._topic_id = ""
        for consumer in [*open_ones, *([monitor] if monitor is not None else [])]:
            consumer.close()


def place(name: str, offset: int = 0) -> Any:
    """An offset of the partition with this name, "TOPIC/NUMBER"."""
    from confluent_kafka import TopicPartition

    topic, _, number = name.rpartition("/")
    return TopicPartition(topic, int(number), offset)


def offsets_at(consumer: Any, names: Sequence[str], when: int) -> dict[str, int]:
    """The first offset of each partition from a time on, in milliseconds since 1970, or `BEGINNING` or `END`; -1: there
    is none. Raises `KafkaException`.

    A consumer's watermarks don't tell: both are the end if the brokers answered only for that.
    """
    found = consumer.offsets_for_times([place(name, when) for name in names], timeout=ANSWER_SECONDS)
    for each in found:
        if each.error is not None:
            raise _library().KafkaException(each.error)
    return {f"{each.topic}/{each.partition}": each.offset for each in found}


class _Reading:
    """A consumer of one partition."""

    def __init__(self, consumer: Any, closed: threading.Event) -> None:
        self.consumer, self._closed = consumer, closed
        self.name, self.position = "", 0

    def begin(self, name: str, start: int) -> None:
        self.name, self.position = name, start
        self.consumer.assign([place(name, start)])

    def chunks(self, end: int, size: int) -> Iterator[list[Any]]:
        """Lists of the messages before offset `end`; waits while the brokers are away. Raises `StreamError`."""
        while self.position < end:
            taken = self.consumer.consume(min(size, end - self.position), _STILL_SECONDS)
            if taken and taken[-1].error() is None and taken[-1].offset() < end and _are_records(taken):
                self.position = taken[-1].offset() + 1
            else:
                taken = list(self._taken(taken, end))
            yield from _parts(taken)
            if self._closed.is_set():
                raise StreamError(f"Reading {self.name} was stopped.")

    def _taken(self, messages: list[Any], end: int) -> Iterator[Any]:
        """The messages before offset `end`, among which may be news of the partition. Raises `StreamError`."""
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
                raise StreamError(
                    f"Offset {self.position} of {self.name} is not there any more: {error.str()}. Its retention is "
                    "shorter than the job's lag."
                )
            elif error.fatal() or not (
                error.retriable() or error.code() <= 0 or error.code() == KafkaError.REQUEST_TIMED_OUT
            ):
                raise StreamError(f"{self.name} can't be read from offset {self.position}: {error.str()}.")


def _are_records(messages: list[Any]) -> bool:
    return not any([message.error() for message in messages])  # noqa: C419, as a list twice as fast


def _parts(messages: list[Any]) -> Iterator[list[Any]]:
    """Messages in lists of few bytes."""
    if messages:
        step = max(1, len(messages) * CHUNK_BYTES // max(sum(map(len, messages)), 1))
        yield from (messages[first : first + step] for first in range(0, len(messages), step))


def _library() -> Any:
    return import_extra("confluent_kafka", "kafka", "Kafka")


def _told(error: Any) -> str:
    first = error.args[0] if error.args else error
    return str(first.str() if hasattr(first, "str") else first)


def connection_settings(config_file: str) -> dict[str, str]:
    """Lines NAME=VALUE of a file, without empty ones and comments. Raises `DataError`, without values.

    Args:
        config_file: "": the one that the environment names, if it names one.
    """
    path = config_file or os.environ.get(CONFIG_VARIABLE, "")
    if not path:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
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
