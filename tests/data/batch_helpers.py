"""What the tests of batch sources share: Keras's own batches, comparing with them, and reading elsewhere."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter

from elasticcb.clients.master import MasterClient
from elasticcb.data.batch_sources.iterables import Layout
from elasticcb.data.batch_sources.keras_data import to_batch
from elasticcb.data.batch_sources.service import DataService
from elasticcb.data.batches import BatchSource
from elasticcb.rpc.server import Server
from elasticcb.security.credentials import Access
from elasticcb.serialization import carry

_READ_ELSEWHERE = """
import sys
from elasticcb.serialization import carry
from elasticcb.clients.master import MasterClient
from elasticcb.data.batch_sources.iterables import Layout

with open(sys.argv[1], "rb") as file:
    address, access, sources = carry.loads(file.read())
client = MasterClient(address, access=access)
results = {}
for name, (source, ranges) in sources.items():
    source.connect(client.next_batch)
    batches = [batch for each in ranges for batch in source.batches(*each)]
    results[name] = [(Layout(batch), Layout(batch).arrays(batch)) for batch in batches]
    source.close()
with open(sys.argv[2], "wb") as file:
    file.write(carry.dumps(results, "results"))
"""

Range = tuple[int, int, int]  # epoch, start, end


def keras_batches(*arguments: Any, **keywords: Any) -> list[Any]:
    """The batches of one epoch that Keras's `fit` makes of its arguments."""
    return list(get_data_adapter(*arguments, **keywords).get_tf_dataset())


def all_batches(source: BatchSource, epoch: int = 0) -> list[Any]:
    assert source.num_batches is not None
    return list(source.batches(epoch, 0, source.num_batches))


def copy_of(source: BatchSource) -> BatchSource:
    """What a worker gets."""
    copy: BatchSource = carry.loads(carry.dumps(source, "a source"))
    return copy


@dataclass
class Caller:
    """The process that calls `fit`, as far as it has data for workers."""

    service: DataService
    server: Server
    client: MasterClient  # a worker's

    def copy_of(self, source: BatchSource) -> BatchSource:
        """What a worker gets of a source whose batches it has to ask for."""
        copy = copy_of(source)
        copy.connect(self.client.next_batch)
        return copy


ACCESS = Access("the token of the job")


@contextlib.contextmanager
def caller() -> Iterator[Caller]:
    service, server = DataService(), Server(access=ACCESS)
    server.add(service.frames())
    server.start()
    client = MasterClient(server.address, access=ACCESS)
    yield Caller(service, server, client)
    client.close()
    server.stop(0.0)


def read_in_another_process(
    sources: dict[str, tuple[BatchSource, list[Range]]], folder: Path, address: str
) -> dict[str, list[Any]]:
    """By name, the batches of all ranges of a source, as a process reads them that got the source pickled."""
    given, result = folder / "given.pkl", folder / "result.pkl"
    given.write_bytes(carry.dumps((address, ACCESS, sources), "sources"))
    subprocess.run([sys.executable, "-c", _READ_ELSEWHERE, given, result], check=True, timeout=150)
    return {
        name: [layout.batch(arrays) for layout, arrays in batches]
        for name, batches in carry.loads(result.read_bytes()).items()
    }


def assert_same_batches(given: list[Any], expected: list[Any]) -> None:
    """Structures, kinds, dtypes, shapes and values are equal."""
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        layout = Layout(to_batch(other))
        assert Layout(to_batch(one)) == layout
        for part, expected_part in zip(layout.arrays(to_batch(one)), layout.arrays(to_batch(other)), strict=True):
            np.testing.assert_array_equal(part, expected_part)


def rows_in(batches: list[Any]) -> list[int]:
    """The first number of each record, over batches."""
    first = [np.asarray(tf.nest.flatten(batch)[0]) for batch in batches]
    return [int(value) for part in first for value in part.reshape(len(part), -1)[:, 0]]
