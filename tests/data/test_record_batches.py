"""Batches of records: `feed_batch` gives what `feed` gives, and its mistakes are explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from batch_helpers import assert_same_batches

from elasticcb.data import Reader, Records, open_reader, read
from elasticcb.errors import DataError, ModelFileError, UsageError

ROWS = 50


def of_csv(folder: Path) -> Reader:
    (folder / "a.csv").write_text("".join(f"{i},{i / 2},w{i % 3}\n" for i in range(ROWS)))
    return open_reader(str(folder / "a.csv"))


def parse_csv(lines: Any) -> Any:
    number, half, word = tf.io.decode_csv(lines, [0, 0.0, ""])
    return {"number": number, "word": word}, half


def of_examples(folder: Path) -> Reader:
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
        for i in range(ROWS):
            feature = {
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=[i, 2 * i])),
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return open_reader(str(folder / "a.tfrecord"))


def parse_examples(records: Any) -> Any:
    parse = tf.io.parse_single_example if records.shape.rank == 0 else tf.io.parse_example
    found = parse(records, {"x": tf.io.FixedLenFeature([2], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)})
    return found["x"], found["y"]


def of_parquet(folder: Path) -> Reader:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = arrow.table({"x": np.arange(ROWS) / 4, "seen": [[i] * (i % 4) for i in range(ROWS)], "y": np.arange(ROWS)})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    return open_reader(str(folder / "a.parquet"))


def parse_parquet(records: Any) -> Any:
    return {"x": records["x"] * 2, "seen": records["seen"]}, records["y"]


def by_feed(parse: Any) -> Any:
    return lambda dataset, mode, metadata: dataset.map(parse)


def by_feed_batch(parse: Any) -> Any:
    return lambda records, mode, metadata: parse(records)


@pytest.mark.parametrize(
    ("make", "parse"),
    [(of_csv, parse_csv), (of_examples, parse_examples), (of_parquet, parse_parquet)],
    ids=["csv", "tfrecord", "parquet"],
)
def test_feed_batch_gives_the_batches_of_feed(tmp_path: Path, make: Any, parse: Any) -> None:
    reader = make(tmp_path)
    name = reader.sources()[0].name
    single = Records(reader, by_feed(parse)).batches("training", 8)
    whole = read(reader, feed_batch=by_feed_batch(parse)).batches("training", 8)
    for start, end in [(0, ROWS), (3, 30), (49, 50)]:
        expected = list(single.batches([(name, start, end)]))
        assert_same_batches(list(whole.batches([(name, start, end)])), expected)
        assert [len(y) for _, y in expected] == [8] * ((end - start) // 8) + [(end - start) % 8] * bool(
            (end - start) % 8
        )
    assert single.keeps_order
    assert whole.keeps_order


def test_a_batch_never_spans_two_ranges(tmp_path: Path) -> None:
    reader = of_csv(tmp_path)
    name = reader.sources()[0].name
    batches = read(reader, feed_batch=by_feed_batch(parse_csv)).batches("training", 4)
    found = [x["number"].numpy().tolist() for x, _ in batches.batches([(name, 40, 46), (name, 8, 12), (name, 9, 10)])]
    assert found == [[40, 41, 42, 43], [44, 45], [8, 9, 10, 11], [9]]


def test_feed_may_select_the_records_of_feed_batch(tmp_path: Path) -> None:
    reader = of_csv(tmp_path)

    def feed(lines: Any, mode: str, metadata: Any) -> Any:
        return lines.filter(lambda line: tf.strings.regex_full_match(line, ".*w0"))

    data = Records(reader, feed, by_feed_batch(parse_csv))
    batches = data.batches("training", 4, joins=False)
    found = [x["number"].numpy().tolist() for x, _ in batches.batches([(reader.sources()[0].name, 0, 20)])]
    assert found == [[0, 3, 6, 9], [12, 15, 18]]
    assert not batches.keeps_order


def test_feed_batch_may_branch_on_tensors(tmp_path: Path) -> None:
    def feed_batch(lines: Any, mode: str, metadata: Any) -> Any:
        lengths = tf.strings.length(lines)
        if tf.reduce_max(lengths) > 100:
            lengths = lengths * 0
        return lengths

    reader = of_csv(tmp_path)
    batches = read(reader, feed_batch=feed_batch).batches("prediction", 4)
    assert next(batches.batches([(reader.sources()[0].name, 0, 4)])).numpy().tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda lines: None, "returned NoneType; expected a tuple"),
        (lambda lines: [lines, lines], "returned list; expected a tuple"),
        (
            lambda lines: (lines, tf.shape(lines)[0]),
            "returned a single value as labels; expected a tensor with one row",
        ),
        (lambda lines: ({"a": 1.0}, lines), r"returned a single value as features\['a'\]"),
        (lambda lines: (object(), lines), "of type object as features; expected tensors"),
        (lambda lines: lines["x"], r"(?s)raised .*Its records are string \[None\] \(lines of text"),
    ],
)
def test_a_wrong_result_of_feed_batch_is_one_clear_error(tmp_path: Path, returned: Any, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        read(of_csv(tmp_path), feed_batch=by_feed_batch(returned)).batches("training", 4)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda lines: (lines, lines[1:]), r"`feed_batch` of .* returned labels with .* records: 3 and 4\."),
        (lambda lines: (lines, tf.concat([lines, lines], 0)), "returned labels with .* records: 8 and 4"),
        (lambda lines: ({"a": tf.strings.split(lines, ",").values}, lines), r"features\['a'\] with .*: 12 and 4"),
    ],
)
def test_rows_that_are_not_those_of_the_records_are_an_error(tmp_path: Path, returned: Any, words: str) -> None:
    reader = of_csv(tmp_path)
    batches = read(reader, feed_batch=by_feed_batch(returned)).batches("training", 4)
    with pytest.raises(DataError, match=words):
        list(batches.batches([(reader.sources()[0].name, 0, 8)]))


def test_read_takes_the_parameters_of_the_format_and_refuses_others(tmp_path: Path) -> None:
    of_csv(tmp_path)
    data = read(tmp_path / "a.csv", columns=["number", "half", "word"], label="half")
    x, y = next(data.batches("training", 2).batches([(data.reader.sources()[0].name, 4, 6)]))
    assert (x["number"].numpy().tolist(), y.numpy().tolist()) == ([4, 5], [2.0, 2.5])
    with pytest.raises(UsageError, match=r"has no parameter 'heder'\. Did you mean 'header'"):
        read(tmp_path / "a.csv", heder=True)
    with pytest.raises(
        UsageError, match=r"column_dtypes is 'half'\. Expected a value for each name of a column, such as"
    ):
        read(tmp_path / "a.csv", column_dtypes="half")
    with pytest.raises(TypeError, match=r"takes no parameters here. Received: header"):
        read(data.reader, header=True)
    with pytest.raises(TypeError, match="must be a path, glob"):
        read(3)  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="label 'half' is for data without a feed"):
        read(data.reader, label="half", feed_batch=by_feed_batch(parse_csv)).batches("training", 2)
