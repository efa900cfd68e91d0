"""Datasets over ranges: one range per iterator, records checked, errors kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.autograph.impl import api

from elasticcb.data import Reader, RecordStream, Source, open_reader, read
from elasticcb.data.stacking import stack_records
from elasticcb.errors import DataError, JobInterrupted


class Given(Reader):
    """Yields what it was given."""

    def __init__(self, records: list[Any], spec: Any) -> None:
        self.records = records
        self.spec = spec

    def sources(self) -> list[Source]:
        return [Source("given", len(self.records))]

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        return iter(self.records[start:end])

    @property
    def element_spec(self) -> Any:
        return self.spec


def stream_of(records: list[Any], spec: Any, end: int | None = None) -> RecordStream:
    return RecordStream(Given(records, spec), lambda: [("given", 0, len(records) if end is None else end)])


def test_every_iterator_reads_the_next_range(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(10)))
    name = str(tmp_path / "a.txt")
    ranges = iter([(name, 0, 3), (name, 3, 3), (name, 8, 10)])
    stream = RecordStream(open_reader(name), lambda: [next(ranges)])
    dataset = stream.dataset.map(lambda line: tf.strings.to_number(line))
    assert [list(dataset.as_numpy_iterator()) for _ in range(3)] == [[0, 1, 2], [], [8, 9]]


def test_datasets_are_made_without_autograph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take 0.2 s in each process of a job."""
    converted: list[Any] = []
    convert = api._convert_actual
    monkeypatch.setattr(api, "_convert_actual", lambda *given: converted.append(given[0]) or convert(*given))
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 3)), y=np.ones(2))
    reader = open_reader(str(tmp_path / "data.npz"))
    stream = RecordStream(reader, lambda: [(reader.sources()[0].name, 0, 2)])
    for mode in ("training", "prediction"):
        read(reader).batches(mode, 2)
    stream_of([np.zeros((1, 0))], tf.TensorSpec((1, 0), tf.float64))
    assert not converted
    stream.dataset.map(lambda record: record["x"])
    assert converted  # a user's function may branch on tensors


def test_iterators_that_are_used_by_turns_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticcb.data.stream.CHUNK_RECORDS", 100)
    records = list(range(3000))
    ranges = iter([("given", 0, 1500), ("given", 1500, 3000)])
    stream = RecordStream(Given(records, tf.TensorSpec((), tf.int64)), lambda: [next(ranges)])
    first, second = stream.dataset.as_numpy_iterator(), stream.dataset.as_numpy_iterator()
    pairs = list(zip(first, second, strict=True))
    assert pairs == [(i, i + 1500) for i in range(1500)]


def test_abandoned_iterators_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticcb.data.stream._OPEN_ITERATORS", 4)
    stream = stream_of(list(range(500)), tf.TensorSpec((), tf.int64))
    for _ in range(6):
        next(iter(stream.dataset))
    assert len(stream._open) <= 4
    assert len(list(stream.dataset)) == 500


def test_nested_records_keep_their_structure() -> None:
    spec = (
        {"a": tf.TensorSpec((2,), tf.float32), "b": tf.TensorSpec((), tf.string)},
        tf.TensorSpec((), tf.int32),
    )
    stream = stream_of([({"b": "é", "a": [1, 2]}, 3), ({"a": np.zeros(2), "b": b"x\0"}, 4)], spec)
    assert stream.dataset.element_spec == spec
    records = list(stream.dataset.as_numpy_iterator())
    np.testing.assert_array_equal(records[0][0]["a"], [1, 2])
    assert [record[0]["b"] for record in records] == ["é".encode(), b"x\0"]
    assert [record[1] for record in records] == [3, 4]


def test_records_of_different_lengths_are_allowed_where_the_spec_leaves_them_open() -> None:
    records = [[1], [2, 3], [4, 5], []]
    for shape in ((None,), None):
        stream = stream_of(records, tf.TensorSpec(shape, tf.int64))
        assert [record.tolist() for record in stream.dataset.as_numpy_iterator()] == records


@given(
    lengths=st.lists(st.integers(0, 3), max_size=30),
    size=st.integers(1, 7),
)
def test_stacked_chunks_hold_all_records_in_order(lengths: list[int], size: int) -> None:
    records = [np.full(length, i) for i, length in enumerate(lengths)]
    chunks = list(stack_records(records, tf.TensorSpec((None,), tf.int64), "given", 0, size))
    assert all(1 <= len(chunk) <= size for chunk in chunks)
    rows = [row for chunk in chunks for row in chunk]
    assert len(rows) == len(records)
    assert all(np.array_equal(row, record) for row, record in zip(rows, records, strict=True))


@pytest.mark.parametrize(
    ("wrong", "spec", "message"),
    [
        ("x", tf.TensorSpec((), tf.float32), "expected float32, got 'x'"),
        (1.5, tf.TensorSpec((), tf.int32), "expected int32, got 1.5"),
        (5, tf.TensorSpec((), tf.string), "expected a string, got 5"),
        ([1, 2], tf.TensorSpec((), tf.int64), r"expected the shape \(\), got \(2,\)"),
        (300, tf.TensorSpec((), tf.uint8), "300"),
        (np.array(300), tf.TensorSpec((), tf.uint8), "expected uint8, which can't represent array"),
        (np.array(-1), tf.TensorSpec((), tf.uint64), "expected uint64, which can't represent array"),
        ((1, 2), {"a": tf.TensorSpec((), tf.int64)}, r"expected a dict with the keys \['a'\]"),
    ],
)
def test_a_record_that_does_not_fit_is_named(wrong: Any, spec: Any, message: str) -> None:
    good: Any = {"a": 1} if isinstance(spec, dict) else (b"s" if spec.dtype == tf.string else 1)
    stream = stream_of([good, good, wrong], spec)
    with pytest.raises(tf.errors.OpError):
        list(stream.dataset)
    with pytest.raises(DataError, match=f"Record 2 of given does not match.*{message}"):
        stream.raise_error()
    assert stream.error is None


def test_the_readers_own_error_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1\nx\n")
    name = str(tmp_path / "a.csv")
    stream = RecordStream(open_reader(name, {"column_dtypes": {0: "int64"}}), lambda: [(name, 0, 2)])
    with pytest.raises(tf.errors.OpError):
        list(stream.dataset.batch(2).prefetch(1))
    assert isinstance(stream.error, DataError)
    assert "record 1 (line 2)" in str(stream.error)


def test_any_other_error_of_a_reader_names_the_range_and_keeps_its_traceback() -> None:
    class Broken(Given):
        def read(self, name: str, start: int, end: int) -> Iterator[Any]:
            yield b"0"
            raise RuntimeError("the cable is out")

    stream = RecordStream(Broken([b"0"] * 4, tf.TensorSpec((), tf.string)), lambda: [("given", 0, 4)])
    with pytest.raises(tf.errors.OpError):
        list(stream.dataset)
    assert stream.error is not None
    assert "Records [0, 4) of given could not be read: RuntimeError: the cable is out" in str(stream.error)
    assert "the cable is out" in stream.error.user_traceback


def test_an_error_of_the_one_who_names_ranges_is_kept() -> None:
    def interrupted() -> list[tuple[str, int, int]]:
        raise JobInterrupted("stop")

    stream = RecordStream(Given([], tf.TensorSpec((), tf.string)), interrupted)
    with pytest.raises(tf.errors.OpError):
        list(stream.dataset)
    with pytest.raises(JobInterrupted):
        stream.raise_error()


@pytest.mark.parametrize(("yielded", "asked"), [(3, 5), (5, 3)])
def test_a_reader_that_yields_another_number_of_records_is_refused(yielded: int, asked: int) -> None:
    class Careless(Given):
        def read(self, name: str, start: int, end: int) -> Iterator[Any]:
            return iter(self.records)

    stream = RecordStream(Careless([b"0"] * yielded, tf.TensorSpec((), tf.string)), lambda: [("given", 0, asked)])
    with pytest.raises(tf.errors.OpError):
        list(stream.dataset)
    assert f"Records [0, {asked}) of given were requested, but Careless yielded" in str(stream.error)
