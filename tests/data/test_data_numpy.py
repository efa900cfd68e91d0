"""NumPy files: arrays by ranges, dict records, the default feed, damaged files."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from elasticcb.data import RecordStream, open_reader
from elasticcb.errors import DataError


def test_rows_of_a_plain_array_are_records(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((500, 3, 2))
    np.save(tmp_path / "a.npy", array)
    reader = open_reader(str(tmp_path))
    name = reader.sources()[0].name
    assert reader.element_spec == tf.TensorSpec((3, 2), tf.float64)
    randomness = random.Random(3)
    for _ in range(20):
        start, end = sorted(randomness.choices(range(501), k=2))
        rows = list(reader.read(name, start, end))
        assert len(rows) == end - start
        assert all(np.array_equal(row, array[start + i]) for i, row in enumerate(rows))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_of_an_archive_are_dicts(tmp_path: Path, save: object) -> None:
    save(tmp_path / "a.npz", x=np.arange(20, dtype=np.float32).reshape(10, 2), y=np.arange(10))  # type: ignore[operator]
    reader = open_reader(str(tmp_path / "a.npz"))
    name = reader.sources()[0].name
    chunk = next(reader.read_chunks(name, 3, 5))
    np.testing.assert_array_equal(chunk["x"], [[6, 7], [8, 9]])
    np.testing.assert_array_equal(chunk["y"], [3, 4])
    assert reader.metadata.column_names == ("x", "y")
    assert reader.metadata.column_dtypes["x"] == "float32"


def test_unusual_but_valid_arrays_are_read(tmp_path: Path) -> None:
    big_endian = np.arange(6, dtype=">f4").reshape(3, 2)
    np.savez(
        tmp_path / "a.npz",
        big=big_endian,
        columns=np.asfortranarray(np.arange(12).reshape(3, 4)),
        text=np.array(["é", "b", ""]),
        raw=np.array([b"a", b"bc", b"d"]),
        flag=np.array([True, False, True]),
    )
    reader = open_reader(str(tmp_path / "a.npz"))
    source = reader.sources()[0]
    records = list(RecordStream(reader, lambda: [(source.name, 0, 3)]).dataset.as_numpy_iterator())
    np.testing.assert_array_equal(records[1]["big"], [2, 3])
    np.testing.assert_array_equal(records[2]["columns"], [8, 9, 10, 11])
    assert records[0]["text"] == "é".encode()
    assert records[1]["raw"] == b"bc"
    assert not records[1]["flag"]


def test_a_structured_array_gives_dicts(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([(1, 2.5), (3, 4.5)], [("id", "i4"), ("value", "f4")]))
    reader = open_reader(str(tmp_path / "a.npy"))
    assert list(reader.read(reader.sources()[0].name, 1, 2)) == [{"id": 3, "value": 4.5}]


def test_a_truncated_array_names_the_record(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((10, 4), np.float32))
    path.write_bytes(path.read_bytes()[: -(16 * 3 + 1)])
    with pytest.raises(DataError, match=r"a\.npy is truncated.*record 6.*10"):
        open_reader(str(path)).sources()


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros(100))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"a\.npz can't be read as a NumPy file"):
        open_reader(str(path)).sources()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, "the same number of records: x has 3, y has 4"),
        ({"x": np.array([{}, []], object)}, "contains Python objects"),
        ({"x": np.array(1.0)}, "single value"),
        ({"x": np.zeros(3, "M8[s]")}, r"dtype datetime64\[s\], which TensorFlow does not support"),
    ],
)
def test_arrays_that_are_no_records_are_explained(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        open_reader(str(tmp_path / "a.npz")).sources()


def test_files_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    np.save(tmp_path / "b.npy", np.zeros((2, 3), np.int32))
    with pytest.raises(DataError, match=r"b\.npy has int32\[3\], but .*a\.npy has float64\[3\]"):
        open_reader(str(tmp_path)).sources()
