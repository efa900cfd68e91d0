"""Indexes: made once, sent to others, and read by."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from elasticcb.data import content, open_reader, text, tfrecord
from elasticcb.data.content import Identity
from elasticcb.data.file_index import FileIndex
from elasticcb.data.file_reader import FileReader
from elasticcb.data.text_index import count_before, odd_so_far
from elasticcb.errors import DataError

ROWS = 200_000


def lines(count: int) -> list[bytes]:
    randomness = random.Random(5)
    return [b"%d,%s" % (i, b"x" * randomness.randrange(20)) for i in range(count)]


def reader_with_indexes_of(master: Any, **params: Any) -> Any:
    reader = open_reader(master._files[0], params)
    assert isinstance(reader, FileReader)
    reader.find_index = lambda name: master.indexes().get(name, b"")
    return reader


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the file was scanned again")


@pytest.mark.parametrize("compress", [False, True])
def test_a_worker_reads_text_by_the_index_of_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: bool
) -> None:
    expected = lines(ROWS)
    path = tmp_path / ("a.csv.gz" if compress else "a.csv")
    data = b"a,b\n" + b"\n".join(expected)
    path.write_bytes(gzip.compress(data, 1) if compress else data)
    master: Any = open_reader(str(path), {"header": True})
    master.sources()
    monkeypatch.setattr(text, "index_records", refuse)
    monkeypatch.setattr(content, "GzipStream", refuse)
    worker = reader_with_indexes_of(master, header=True)
    assert worker.metadata.column_names == ("a", "b")
    for start, end in ((0, 10), (ROWS - 3, ROWS), (ROWS // 3, ROWS // 3 + 5000)):
        assert list(worker.read(str(path), start, end)) == expected[start:end]


def test_a_worker_reads_tfrecords_by_the_index_of_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = lines(ROWS)
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for record in expected:
            writer.write(record)
    master: Any = open_reader(path)
    master.sources()
    monkeypatch.setattr(tfrecord, "index_records", refuse)
    worker = reader_with_indexes_of(master)
    for start, end in ((0, 10), (ROWS - 3, ROWS), (ROWS // 3, ROWS // 3 + 5000)):
        assert list(worker.read(path, start, end)) == expected[start:end]


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_the_beginning_is_read_without_the_rest(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a{ending}"
    randomness = random.Random(6)
    data = b"\n".join(randomness.randbytes(50).hex().encode() for _ in range(100_000))
    path.write_bytes(gzip.compress(data, 1) if ending.endswith("gz") else data)
    furthest = 0
    read = content.LocalFile.read

    def watched(self: Any, start: int, stop: int) -> bytes:
        nonlocal furthest
        furthest = max(furthest, stop)
        return read(self, start, stop)

    monkeypatch.setattr(content.LocalFile, "read", watched)
    reader: Any = open_reader(str(path))
    assert reader.head(str(path), 64) == 64
    assert len(list(reader.read(str(path), 0, 64))) == 64
    assert furthest <= path.stat().st_size / 2


def test_an_index_is_small_and_survives_its_way(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n".join(lines(ROWS)))
    reader: Any = open_reader(str(path))
    reader.sources()
    (data,) = reader.indexes().values()
    assert len(data) < path.stat().st_size / 1000
    index = FileIndex.from_bytes(data)
    assert index.count == ROWS
    assert FileIndex.from_bytes(index.to_bytes()).to_bytes() == data


def test_an_index_of_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1\n2\n")
    master: Any = open_reader(str(tmp_path / "a.csv"))
    master.sources()
    worker = reader_with_indexes_of(master)
    (tmp_path / "a.csv").write_text("1\n2\n3\n")
    with pytest.raises(DataError, match=r"a\.csv was changed.*4 bytes"):
        list(worker.read(str(tmp_path / "a.csv"), 0, 1))


def test_clocks_of_other_machines_do_not_count() -> None:
    file = Identity(10, "5", "here")
    assert file.matches(Identity(10, "5", "here"))
    assert not file.matches(Identity(10, "6", "here"))
    assert file.matches(Identity(10, "6", "there"))
    assert not file.matches(Identity(11, "5", "there"))


# ---------------------------------------------------------------- flags of bytes, counted and followed by words


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_flags_are_counted_as_one_by_one(flags: list[bool]) -> None:
    array = np.array(flags)
    assert odd_so_far(array).tolist() == np.logical_xor.accumulate(array).tolist()
    assert count_before(array, np.arange(len(array))).tolist() == [sum(flags[:place]) for place in range(len(flags))]


@pytest.mark.parametrize("size", [63, 64, 65, 1 << 16, (1 << 19) + 7])
def test_all_flags_may_be_set(size: int) -> None:
    flags = np.ones(size, bool)
    assert count_before(flags, np.array([0, size - 1])).tolist() == [0, size - 1]
    assert odd_so_far(flags)[[0, 1, size - 1]].tolist() == [True, False, size % 2 == 1]
