"""ArrayRecord and Parquet files, where their libraries are installed."""

from __future__ import annotations

import datetime
import decimal
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticcb import Mode
from elasticcb.data import RecordStream, open_reader, read
from elasticcb.errors import DataError, UsageError


def write_array_records(path: Path, records: list[bytes]) -> Path:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:4,uncompressed")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_array_record_ranges_equal_what_was_written(tmp_path: Path) -> None:
    records = [b"%d\0" % i for i in range(500)]
    path = write_array_records(tmp_path / "a.array_record", records)
    reader = open_reader(str(path))
    assert reader.sources()[0].count == 500
    for _ in range(20):
        start, end = sorted(random.Random(4).choices(range(501), k=2))
        assert list(reader.read(str(path), start, end)) == records[start:end]


def test_a_truncated_array_record_file_is_named(tmp_path: Path) -> None:
    path = write_array_records(tmp_path / "a.array_record", [b"x" * 100] * 100)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"a\.array_record.*damaged or incomplete"):
        open_reader(str(path)).sources()


def write_parquet(path: Path, columns: dict[str, Any], rows_per_group: int = 7) -> Path:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table(columns), path, row_group_size=rows_per_group)
    return path


def test_parquet_ranges_cross_row_groups(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    vectors = np.arange(60, dtype=np.float32)
    path = write_parquet(
        tmp_path / "a.parquet",
        {
            "id": np.arange(30),
            "name": [f"n{i}" for i in range(30)],
            "kind": arrow.array(["a", "b"] * 15).dictionary_encode(),
            "flag": [i % 2 == 0 for i in range(30)],
            "vector": arrow.FixedSizeListArray.from_arrays(vectors, 2),
        },
    )
    reader = open_reader(str(path))
    assert reader.sources()[0].count == 30
    randomness = random.Random(5)
    for _ in range(20):
        start, end = sorted(randomness.choices(range(31), k=2))
        records = list(RecordStream(reader, lambda s=start, e=end: [(str(path), s, e)]).dataset.as_numpy_iterator())
        assert [record["id"] for record in records] == list(range(start, end))
        for i, record in enumerate(records, start):
            assert record["name"] == b"n%d" % i
            assert record["kind"] == (b"a", b"b")[i % 2]
            assert record["flag"] == (i % 2 == 0)
            np.testing.assert_array_equal(record["vector"], [2 * i, 2 * i + 1])


def test_parquet_lists_of_varying_length_become_ragged_batches(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    lists: dict[str, list[Any]] = {
        "seen": [[7] * (i % 4) if i != 5 else None for i in range(30)],
        "words": [[f"w{j}" for j in range(i % 3)] for i in range(30)],
        "nested": [[[j] * j for j in range(i % 4)] for i in range(30)],
        "vectors": [[[i, j] for j in range(i % 3)] for i in range(30)],
    }
    vectors = arrow.array(lists["vectors"], arrow.list_(arrow.list_(arrow.float32(), 2)))
    path = write_parquet(tmp_path / "a.parquet", {**lists, "vectors": vectors, "y": np.arange(30)})
    reader = open_reader(str(path))
    x, y = next(read(reader, label="y").batches(Mode.TRAINING, 20).batches([(str(path), 3, 29)]))
    assert y.numpy().tolist() == list(range(3, 23))
    assert {name: value.shape.as_list() for name, value in x.items()} == {
        "seen": [20, None],
        "words": [20, None],
        "nested": [20, None, None],
        "vectors": [20, None, 2],
    }
    for name, expected in lists.items():
        found = [[word.decode() for word in row] for row in x[name].to_list()] if name == "words" else x[name].to_list()
        assert found == [row or [] for row in expected[3:23]]
    rows = list(reader.read(str(path), 4, 8))
    assert [row["seen"].tolist() for row in rows] == [[], [], [7, 7], [7, 7, 7]]


def test_each_parquet_type_becomes_the_tensor_of_the_documented_table(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    moment, day = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901), 19724
    microseconds = ((day * 24 + 3) * 3600 + 4 * 60 + 5) * 1_000_000 + 678901
    given = {
        "small": (arrow.int8(), 3, np.int8(3)),
        "flag": (arrow.bool_(), True, np.True_),
        "half": (arrow.float16(), np.float16(1.5), np.float16(1.5)),
        "price": (arrow.decimal128(9, 2), decimal.Decimal("1.25"), np.float64(1.25)),
        "key": (arrow.decimal128(38, 0), decimal.Decimal(2**60 + 1), np.int64(2**60 + 1)),
        "at": (arrow.timestamp("ns"), moment, np.int64(microseconds)),
        "at_zone": (arrow.timestamp("us", "Europe/Berlin"), moment, np.int64(microseconds)),
        "day": (arrow.date32(), moment.date(), np.int64(day)),
        "day64": (arrow.date64(), moment.date(), np.int64(day)),
        "clock": (arrow.time32("s"), datetime.time(0, 1, 2), np.int64(62_000_000)),
        "lasts": (arrow.duration("ms"), datetime.timedelta(seconds=3), np.int64(3_000_000)),
        "text": (arrow.string(), "ä", "ä".encode()),
        "code": (arrow.binary(2), b"a\0", b"a\0"),
    }
    columns = {name: arrow.array([value], kind) for name, (kind, value, _) in given.items()}
    path = write_parquet(tmp_path / "a.parquet", columns)
    (record,) = open_reader(str(path)).read(str(path), 0, 1)
    for name, (_, _, expected) in given.items():
        assert (record[name], type(record[name])) == (expected, type(expected)), name
    path = write_parquet(tmp_path / "b.parquet", {"key": arrow.array([decimal.Decimal(2**70)])})
    with pytest.raises(DataError, match=r"column 'key' of .*b\.parquet.*int64"):
        list(open_reader(str(path)).read(str(path), 0, 1))


def test_parquet_nulls_are_named_where_no_value_stands_for_them(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"f": [1.0, None], "s": ["x", None]})
    records = list(open_reader(str(path)).read(str(path), 0, 2))
    assert np.isnan(records[1]["f"])
    assert records[1]["s"] == b""
    columns = {"i": [*range(10), None], "at": [datetime.datetime(2024, 1, 1)] * 10 + [None], "l": [[1]] * 10 + [[None]]}
    path = write_parquet(tmp_path / "b.parquet", columns)
    for name in columns:
        reader = open_reader(str(path), {"columns": name})
        with pytest.raises(DataError, match=rf"Record 10 of .*b\.parquet is null in column '{name}'.*fill_null="):
            list(reader.read(str(path), 8, 11))
    filled = open_reader(str(path), {"fill_null": {"i": -1, "at": 0, "l": 9}})
    assert [row | {"l": row["l"].tolist()} for row in filled.read(str(path), 10, 11)] == [{"i": -1, "at": 0, "l": [9]}]
    for wrong, message in (({"j": 0}, "unknown column 'j'"), ({"i": "x"}, "'x' for the column 'i'. Expected int64")):
        with pytest.raises(UsageError, match=message):
            open_reader(str(path), {"fill_null": wrong}).sources()


def test_parquet_columns_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2], "pair": [{"a": 1}, {"a": 2}]})
    with pytest.raises(DataError, match=r"'pair' of .*a\.parquet.*struct.*`columns`"):
        open_reader(str(path)).sources()
    assert list(open_reader(str(path), {"columns": ["id"]}).read(str(path), 0, 2)) == [{"id": 1}, {"id": 2}]
    with pytest.raises(DataError, match=r"has no column idd"):
        open_reader(str(path), {"columns": ["idd"]}).sources()


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"id": np.arange(100)})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a\.parquet can't be read"):
        open_reader(str(path)).sources()


def test_a_missing_library_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what Python does for a module it can't import
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"pip install 'elasticcb\[parquet\]'"):
        open_reader(str(tmp_path / "a.parquet")).sources()
