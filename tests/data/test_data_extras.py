"""ArrayRecord and Parquet files, where their libraries are installed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticcb import Mode
from elasticcb.data import RecordStream, open_reader
from elasticcb.errors import DataError


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
    with pytest.raises(DataError, match=r"a\.array_record can't be read: RuntimeError: .*damaged or incomplete"):
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
        records = list(RecordStream(reader, lambda s=start, e=end: (str(path), s, e)).dataset.as_numpy_iterator())
        assert [record["id"] for record in records] == list(range(start, end))
        for i, record in enumerate(records, start):
            assert record["name"] == b"n%d" % i
            assert record["kind"] == (b"a", b"b")[i % 2]
            assert record["flag"] == (i % 2 == 0)
            np.testing.assert_array_equal(record["vector"], [2 * i, 2 * i + 1])


def test_parquet_default_feed_takes_the_named_label(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"a": [1.0, 2.0], "clicked": [0, 1]})
    reader = open_reader(str(path), {"label": "clicked"})
    feed = reader.default_feed()
    assert feed is not None
    dataset = feed(RecordStream(reader, lambda: (str(path), 1, 2)).dataset, Mode.TRAINING, reader.metadata)
    assert list(dataset.as_numpy_iterator()) == [({"a": 2.0}, 1)]


def test_parquet_nulls_are_named_where_no_value_stands_for_them(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"f": [1.0, None], "s": ["x", None]})
    records = list(open_reader(str(path)).read(str(path), 0, 2))
    assert np.isnan(records[1]["f"])
    assert records[1]["s"] == b""
    path = write_parquet(tmp_path / "b.parquet", {"i": [*range(10), None]})
    with pytest.raises(DataError, match=r"Record 10 of .*b\.parquet is null in column 'i'"):
        list(open_reader(str(path)).read(str(path), 8, 11))


def test_parquet_columns_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2], "many": [[1], [1, 2]]})
    with pytest.raises(DataError, match=r"Column 'many' of .*a\.parquet has the type list.*`columns`"):
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
