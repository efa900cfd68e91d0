"""Data without a feed: columns with types, missing values and dates become features and labels."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from elasticcb.data import Records, read, text
from elasticcb.errors import DataError, ModelFileError, UsageError

DAY = (datetime.date(2026, 11, 29) - datetime.date(1970, 1, 1)).days
LINES = (
    "user,price,plays,word,day,at,click\n"
    '7,1.5,3,"a, b",2026-11-29,2026-11-29T00:00:01.5Z,1\n'
    "8,,,,1970-01-02,1970-01-01 00:00:01,0\n"
)


def batch_of(data: Records, mode: str = "training", start: int = 0, inputs: Sequence[str] | None = None) -> Any:
    source = data.reader.sources()[0]
    batch = next(data.batches(mode, 64, inputs=inputs).batches([(source.name, start, source.count)]))
    return tf.nest.map_structure(lambda leaf: leaf.numpy(), batch)


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.csv"
    path.write_text(LINES)
    return path


def test_columns_of_csv_have_the_types_of_their_values(clicks: Path) -> None:
    x, y = batch_of(read(clicks, header=True, label="click"))
    assert y.tolist() == [1, 0]
    assert {name: values.dtype.name for name, values in x.items()} == {
        "user": "int64", "price": "float32", "plays": "float32", "word": "object", "day": "int64", "at": "int64",
    }  # fmt: skip
    assert x["user"].tolist() == [7, 8]
    np.testing.assert_array_equal(x["price"], [1.5, np.nan])
    np.testing.assert_array_equal(x["plays"], [3, np.nan])
    assert x["word"].tolist() == [b"a, b", b""]
    assert x["day"].tolist() == [DAY, 1]
    assert x["at"].tolist() == [DAY * 86400 * 10**6 + 1_500_000, 10**6]


def test_types_and_values_of_empty_fields_can_be_set(clicks: Path) -> None:
    given: dict[str, Any] = {
        "column_dtypes": {"user": "float32", "day": "str", "price": "float64"},
        "fill_null": {"plays": -1, "price": 2.5, "word": "none"},
    }
    x, _ = batch_of(read(clicks, header=True, label="click", **given))
    assert x["user"].dtype == np.float32
    assert x["price"].tolist() == [1.5, 2.5]
    assert x["plays"].dtype == np.int64
    assert x["plays"].tolist() == [3, -1]
    assert x["word"].tolist() == [b"a, b", b"none"]
    assert x["day"].tolist() == [b"2026-11-29", b"1970-01-02"]


def test_features_are_the_columns_that_the_models_inputs_name(clicks: Path) -> None:
    data = read(clicks, header=True, label="click")
    assert list(batch_of(data, inputs=["price", "user"])[0]) == ["price", "user"]
    with pytest.raises(DataError, match=r"inputs that are not columns of the data: device\. The columns are user"):
        batch_of(data, inputs=["price", "device"])


def test_a_label_that_is_missing_in_a_record_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("price,click\n1,0.5\n2,\n")
    with pytest.raises(DataError, match=r"a\.csv can't be .*: The label 'click' is missing or NaN in a record"):
        batch_of(read(path, header=True, label="click"))
    assert batch_of(read(path, header=True, label="click", fill_null={"click": 2}))[1].tolist() == [0.5, 2]


def test_predictions_need_no_label(clicks: Path, tmp_path: Path) -> None:
    assert "click" not in batch_of(read(clicks, header=True, label="click"), "prediction")
    without = tmp_path / "without.csv"
    without.write_text("a,b\n1,2\n")
    assert sorted(batch_of(read(without, header=True, label="click"), "prediction")) == ["a", "b"]


def test_parameters_for_the_label_do_not_matter_where_predictions_lack_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("price\n1.5\n")
    more: dict[str, Any] = {"column_dtypes": {"click": "float32"}, "fill_null": {"click": 0}}
    x = batch_of(read(path, header=True, label="click", **more), "prediction")
    assert x["price"].tolist() == [1.5]
    examples = write_examples(tmp_path / "a.tfrecord", [{"price": [1.5]}])
    x = batch_of(read(examples, label="y", columns=["price", "y"], fill_null={"y": 0}), "prediction")
    assert x["price"].tolist() == [1.5]


def test_a_label_that_is_absent_is_told_with_the_columns(clicks: Path) -> None:
    for label in ("clicks", ""):
        with pytest.raises(DataError, match=r"label.* columns of the data are user, price, .*click\. Set --label"):
            read(clicks, header=True, label=label).batches("training", 4)


def test_lines_without_names_ask_for_a_header(clicks: Path) -> None:
    with pytest.raises(ModelFileError, match=r"columns of the records are not known\. Set .* header=true"):
        read(clicks, label="click").batches("training", 4)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["x,2026-11-29,1"], r"clicks\.csv, record 3 \(line 5\), column user: 'x' is not a valid int64"),
        ([",2026-11-29,1"], r"line 5\), column user: the field is empty, and int64 has .*fill_null=\{'user': value\}"),
        (["5,29.11.2026,1"], r"line 5\), column day: '29.11.2026' is not a valid date"),
        (["5,2026-02-30,1"], r"line 5\), column day: '2026-02-30' is not a valid date"),
        (["5,,1"], r"line 5\), column day: the field is empty, .*fill_null=\{'day': value\}\.$"),
        (["5,2026,1"], r"line 5\), column day: '2026' is not a valid date"),
        (["5,2026-11-29 08:00:00,1"], r"line 5\), column day: '2026-11-29 08:00:00' is not a valid date"),
        (["5,today,1"], r"line 5\), column day: 'today' is not a valid date"),
        (["5,2026-11-29,300"], r"line 5\), column click: '300' is not a valid int8"),
        (["1_000,2026-11-29,1"], r"line 5\), column user: '1_000' is not a valid int64"),
        (["5,2026-11-29,1,2"], r"clicks\.csv, record 3 \(line 5\) has 4 fields, but the header has 3"),
    ],
)
def test_a_wrong_value_is_told_with_file_line_and_column(tmp_path: Path, lines: list[str], words: str) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("\n".join(["user,day,click", *["5,2026-11-29,1"] * 3, *lines, ""]))
    types = {"user": "int64", "day": "date", "click": "int8"}
    with pytest.raises(DataError, match=words):
        batch_of(read(path, header=True, label="click", column_dtypes=types))


def test_other_threads_read_as_before_while_a_wrong_value_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "SAMPLE_RECORDS", 2)
    path = tmp_path / "clicks.csv"
    path.write_text("user,click\n5,1\n6,0\nx,1\n")
    reader: Any = read(path, header=True, label="click", column_dtypes={"user": "int64"}).reader
    check, (source,), read_meanwhile = reader._check_dtypes, reader.sources(), []

    def also_read(*given: Any) -> None:
        read_meanwhile.extend(reader.read(source.name, 0, source.count))
        check(*given)

    explain = reader.record_format().explain
    monkeypatch.setattr(reader, "_check_dtypes", also_read)
    with pytest.raises(DataError, match=r"line 4\), column user: 'x' is not a valid int64"):
        explain(source.name, 0, source.count)
    assert read_meanwhile == [b"5,1", b"6,0", b"x,1"]


def test_times_that_do_not_exist_and_names_that_occur_twice_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("t,y\n2026-11-29 08:00:00Z,1\n2026-11-29 25:00:00Z,1\n")
    with pytest.raises(DataError, match=r"line 3\), column t: '2026-11-29 25:00:00Z' is not a valid timestamp"):
        batch_of(read(path, header=True, label="y"))
    path.write_text("a,a,y\n1,2,3\n")
    with pytest.raises(DataError, match=r"name 'a' occurs 2 times in a, a, y"):
        read(path, header=True, label="y").batches("training", 4)


def test_large_integers_with_empty_fields_are_not_rounded(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"id,y\n{2**40},1\n,2\n")
    with pytest.raises(DataError, match=r"'id' of .* has large integers and empty fields.*fill_null=\{'id': value\}"):
        read(path, header=True, label="y").batches("training", 4)
    path.write_text(f"id,y\n{2**64},1\n3,2\n")
    with pytest.raises(DataError, match=r"integers that int64 does not hold.*column_dtypes=\{'id': 'string'\}"):
        read(path, header=True, label="y").batches("training", 4)
    path.write_text("id,y\n1732867200.5,1\n3,2\n")
    x, _ = batch_of(read(path, header=True, label="y"))
    assert x["id"].tolist() == [1732867200.5, 3]
    path.write_text(f"id,y\n{2**40},1\n,2\n")
    with pytest.raises(UsageError, match="unknown column 'di'"):
        read(path, header=True, label="y", fill_null={"di": 0}).batches("training", 4)
    x, _ = batch_of(read(path, header=True, label="y", fill_null={"id": 0}))
    assert x["id"].tolist() == [2**40, 0]


def write_examples(path: Path, examples: list[dict[str, Any]]) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for values in examples:
            example = tf.train.Example()
            for name, value in values.items():
                kind = {int: "int64_list", float: "float_list", bytes: "bytes_list"}[type(value[0])]
                getattr(example.features.feature[name], kind).value.extend(value)
            writer.write(example.SerializeToString())
    return path


def test_features_of_examples_are_columns(tmp_path: Path) -> None:
    path = write_examples(
        tmp_path / "a.tfrecord",
        [
            {"user": [7], "price": [1.5], "vector": [1.0, 2.0], "words": [b"a", b"b"], "y": [1]},
            {"user": [8], "vector": [3.0, 4.0], "words": [b"c"], "y": [0]},
        ],
    )
    x, y = batch_of(read(path, label="y"))
    assert (x["user"].tolist(), y.tolist()) == ([7, 8], [1, 0])
    np.testing.assert_array_equal(x["price"], [1.5, np.nan])
    assert x["vector"].tolist() == [[1, 2], [3, 4]]
    assert [words.tolist() for words in x["words"]] == [[b"a", b"b"], [b"c"]]
    x, _ = batch_of(read(path, label="y", columns=["price", "y"], fill_null={"price": 0.5}))
    assert {name: values.tolist() for name, values in x.items()} == {"price": [1.5, 0.5]}
    with pytest.raises(DataError, match=r"have no feature prize, .*Their features are price, user, vector, words, y"):
        read(path, label="y", columns=["prize", "y"]).batches("training", 4)


def test_empty_lists_of_examples_are_missing_values(tmp_path: Path) -> None:
    def written(prices: list[list[float]]) -> Records:
        path = tmp_path / "a.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number, values in enumerate(prices):
                example = tf.train.Example()
                example.features.feature["price"].float_list.value.extend(values)
                example.features.feature["y"].int64_list.value.append(number)
                writer.write(example.SerializeToString())
        return read(path, label="y")

    x, _ = batch_of(written([[1.5], [], [2.5]]))
    np.testing.assert_array_equal(x["price"], [1.5, np.nan, 2.5])
    with pytest.raises(DataError, match=r"'price' has lists that are neither empty nor of 1"):
        batch_of(written([*[[1.5], []] * 500, [2.5, 3.5]]), start=990)


def test_records_that_are_no_examples_ask_for_a_feed(tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(b"\xff\xfe no example")
    with pytest.raises(ModelFileError, match="first records are not serialized"):
        read(tmp_path / "a.tfrecord", label="y").batches("training", 4)


@pytest.mark.parametrize(
    ("names", "label", "expected"),
    [
        (("x", "y"), "", "bare"),
        (("features", "labels", "sample_weight"), "", "weighted"),
        (("a", "b", "target"), "target", "dict"),
    ],
)
def test_arrays_of_known_names_are_features_and_labels(
    tmp_path: Path, names: tuple[str, ...], label: str, expected: str
) -> None:
    np.savez(tmp_path / "a.npz", **{name: np.full(1, i) for i, name in enumerate(names)})
    data = read(tmp_path / "a.npz", label=label)
    first = batch_of(data)
    assert first == {"bare": (0, 1), "weighted": (0, 1, 2), "dict": ({"a": 0, "b": 1}, 2)}[expected]
    assert batch_of(data, "prediction") == first[0]
