"""TFRecord files: the index against what TensorFlow writes, and damaged files."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import google_crc32c
import pytest
import tensorflow as tf

from elasticcb.data import open_reader
from elasticcb.data.content import GzipStream, MemoryContent, open_file
from elasticcb.data.tfrecord import index_records
from elasticcb.errors import DataError


def write_records(path: Path, records: list[bytes]) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def random_records(count: int) -> list[bytes]:
    return [os.urandom(random.Random(i).randrange(400)) + b"\0" for i in range(count)]


def test_a_range_of_records_equals_that_part_of_what_was_written(tmp_path: Path) -> None:
    records = random_records(3000)
    path = write_records(tmp_path / "a.tfrecord", records)
    reader = open_reader(str(path))
    assert [source.count for source in reader.sources()] == [3000]
    randomness = random.Random(2)
    for _ in range(30):
        start, end = sorted(randomness.choices(range(3001), k=2))
        assert list(reader.read(str(path), start, end)) == records[start:end]


@pytest.mark.parametrize("block_bytes", [12, 13, 29, 64, 1000])
def test_records_are_found_wherever_blocks_are_cut(tmp_path: Path, block_bytes: int) -> None:
    records = [b"", b"a", b"b" * 40, b"", b"c" * 12]
    content = MemoryContent("memory", write_records(tmp_path / "a.tfrecord", records).read_bytes())
    content.block_bytes = block_bytes
    places, complete = index_records(content)
    assert (places.count, complete) == (5, True)
    assert places.offsets.tolist() == [0, content.memory_bytes]


def test_records_larger_than_a_chunk_are_read(tmp_path: Path) -> None:
    records = [os.urandom(3 << 20) for _ in range(4)]
    path = write_records(tmp_path / "a.tfrecord", records)
    assert list(open_reader(str(path)).read(str(path), 0, 4)) == records


@pytest.mark.parametrize("cut", [1, 4, 10, 13, 14, 20, 25])
def test_a_truncated_file_names_the_record(tmp_path: Path, cut: int) -> None:
    path = write_records(tmp_path / "a.tfrecord", [b"0123456789"] * 5)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"a\.tfrecord is truncated.*record 4.*byte 104"):
        open_reader(str(path)).sources()


def test_a_damaged_length_names_the_record(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrecord", [b"0123456789"] * 5)
    data = bytearray(path.read_bytes())
    data[2 * 26 + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"Record 2 of .*a\.tfrecord.*length.*checksum"):
        open_reader(str(path)).sources()


def test_a_file_of_another_format_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"some text, and no records at all\n" * 10)
    with pytest.raises(DataError, match=r"Record 0 of .*is not a TFRecord file"):
        open_reader(str(path)).sources()


def test_damaged_data_is_found_and_names_the_record(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrecord", [b"0123456789"] * 5)
    data = bytearray(path.read_bytes())
    data[3 * 26 + 15] ^= 1
    path.write_bytes(data)
    reader = open_reader(str(path))
    assert len(list(reader.read(str(path), 0, 3))) == 3
    with pytest.raises(DataError, match=r"Record 3 of .*a\.tfrecord does not match its checksum"):
        list(reader.read(str(path), 2, 5))


def test_compressed_records_are_read_whatever_the_file_is_called(tmp_path: Path) -> None:
    records = random_records(100)
    path = write_records(tmp_path / "a.tfrecord", records)
    path.write_bytes(gzip.compress(path.read_bytes()))
    reader = open_reader(str(path))
    assert [source.count for source in reader.sources()] == [100]
    assert list(reader.read(str(path), 30, 60)) == records[30:60]


def test_a_compressed_file_is_decompressed_once_to_be_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path / "a.tfrecord", random_records(20_000))
    path.write_bytes(gzip.compress(path.read_bytes()))
    rewound = []
    monkeypatch.setattr(gzip._GzipReader, "_rewind", rewound.append)
    assert index_records(GzipStream(open_file(str(path))))[0].count == 20_000
    assert not rewound


def test_a_record_whose_length_looks_like_the_beginning_of_gzip_is_read(tmp_path: Path) -> None:
    record = bytes(int.from_bytes(b"\x1f\x8b\x08", "little"))
    path = write_records(tmp_path / "a.tfrecord", [record, b"x"])
    reader = open_reader(str(path))
    assert reader.sources()[0].count == 2
    assert list(reader.read(str(path), 0, 2)) == [record, b"x"]


def test_checksums_are_computed_in_c() -> None:
    assert google_crc32c.implementation == "c"  # Python's is a thousand times slower
