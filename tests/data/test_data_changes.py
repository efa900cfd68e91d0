"""Files that change while a job uses them: one error that names the file, in every format, here and far away."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.data import open_reader
from elasticcb.errors import DataError

ROWS = 2000


def write_text(path: Path, rows: int) -> None:
    path.write_text("".join(f"{i},{i}\n" for i in range(rows)))


def write_gzip(path: Path, rows: int) -> None:
    path.write_bytes(gzip.compress(b"".join(b"%d,%d\n" % (i, i) for i in range(rows))))


def write_tfrecord(path: Path, rows: int) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in range(rows):
            writer.write(b"%d" % i)


def write_numpy(path: Path, rows: int) -> None:
    np.save(path, np.arange(rows))


def write_archive(path: Path, rows: int) -> None:
    np.savez_compressed(path, x=np.arange(rows))


def write_parquet(path: Path, rows: int) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"x": list(range(rows))}), path)


def write_array_record(path: Path, rows: int) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for i in range(rows):
        writer.write(b"%d" % i)
    writer.close()


FORMATS = {
    "a.csv": write_text,
    "a.csv.gz": write_gzip,
    "a.tfrecord": write_tfrecord,
    "a.npy": write_numpy,
    "a.npz": write_archive,
    "a.parquet": write_parquet,
    "a.array_record": write_array_record,
}


@pytest.fixture(params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path, int], None]]:
    write = FORMATS[request.param]
    write(tmp_path / request.param, ROWS)
    return tmp_path / request.param, write


@pytest.mark.parametrize(("opened_before", "rows"), [(True, 2 * ROWS), (False, ROWS // 2)])
def test_a_file_that_grew_or_shrank_is_named(
    written: tuple[Path, Callable[[Path, int], None]], opened_before: bool, rows: int
) -> None:
    path, write = written
    reader = open_reader(str(path))
    reader.sources()
    if opened_before:
        assert len(list(reader.read(str(path), 0, 10))) == 10
    write(path, rows)
    with pytest.raises(DataError, match=rf"{path.name} was changed.* bytes"):
        list(reader.read(str(path), 0, 10))


def test_a_file_that_changes_between_two_chunks_is_named(written: tuple[Path, Callable[[Path, int], None]]) -> None:
    path, write = written
    chunks = open_reader(str(path)).read_chunks(str(path), 0, ROWS, 100)
    next(chunks)
    write(path, 2 * ROWS)
    with pytest.raises(DataError, match=rf"{path.name} was changed"):
        list(chunks)


def test_a_file_that_is_replaced_by_one_of_the_same_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    reader = open_reader(str(tmp_path))
    (source,) = reader.sources()
    (tmp_path / "b.csv").write_text("5,6\n7,8\n")
    os.utime(tmp_path / "b.csv", ns=(0, 10**18))
    os.replace(tmp_path / "b.csv", tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a\.csv was changed.*modified .*modified 2001-09-0"):
        list(reader.read(source.name, 0, 2))


def test_a_remote_file_that_changes_is_named() -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/changing/a.csv", b"1,2\n3,4\n")
    try:
        reader = open_reader("memory://changing/a.csv")
        reader.sources()
        assert list(reader.read("memory://changing/a.csv", 0, 1)) == [b"1,2"]
        files.pipe("/changing/a.csv", b"1,2\n3,4\n5,6\n")
        with pytest.raises(DataError, match=r"memory://changing/a\.csv was changed .* had 8 bytes .* has 12 bytes"):
            list(reader.read("memory://changing/a.csv", 0, 1))
    finally:
        files.rm("/changing", recursive=True)
