"""Readers as sources of batches: numbered over files, with feeds that keep, drop or multiply records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from batch_helpers import all_batches, assert_same_batches, copy_of, rows_in

from elasticcb import Mode
from elasticcb.data import Reader, open_reader
from elasticcb.data.batch_sources.adapt import adapt
from elasticcb.data.batch_sources.records import Records, read
from elasticcb.errors import DataError, ModelFileError
from elasticcb.serialization import carry


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """15 records in two files of 10 and 5."""
    folder = tmp_path / "csv"
    folder.mkdir()
    (folder / "a.csv").write_text("".join(f"{i},{i % 2}\n" for i in range(10)))
    (folder / "b.csv").write_text("".join(f"{i},{i % 2}\n" for i in range(10, 15)))
    return open_reader(str(folder))


def feed(dataset: tf.data.Dataset, mode: str, metadata: Any) -> tf.data.Dataset:
    def parse(line: Any) -> Any:
        feature, label = tf.io.decode_csv(line, [0.0, 0.0])
        return feature if mode == Mode.PREDICTION else (feature, label)

    return dataset.map(parse)


def adapted(data: Any, folder: Path, **options: Any) -> Any:
    return adapt(data, **{"batch_size": 4, "shuffle": False, "purpose": "fit", "folder": folder, "seed": 1, **options})


def test_batches_never_span_two_files_and_are_read_by_number(reader: Reader, tmp_path: Path) -> None:
    source = adapted(Records(reader, feed), tmp_path)
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    assert source.num_batches == 5
    assert source.keeps_order
    assert [rows_in([batch]) for batch in all_batches(source)] == batches
    copy = copy_of(source)
    for start, end in [(1, 4), (4, 5), (0, 1), (2, 3)]:
        assert [rows_in([batch]) for batch in copy.batches(0, start, end)] == batches[start:end]


def test_shuffled_batches_are_read_once_in_an_epoch_by_two_workers(reader: Reader, tmp_path: Path) -> None:
    source = adapted(Records(reader, feed), tmp_path, shuffle=True)
    one, other = copy_of(source), copy_of(source)
    orders = []
    for epoch in range(2):
        orders.append(rows_in([*one.batches(epoch, 2, 5), *other.batches(epoch, 0, 2)]))
        assert sorted(orders[-1]) == list(range(15))
    assert orders[0] != orders[1]


def test_a_feed_that_drops_records_makes_short_batches_or_none(reader: Reader, tmp_path: Path) -> None:
    source = adapted(Records(reader, lambda *given: feed(*given).filter(lambda x, _: x > 5)), tmp_path)
    assert [rows_in([batch]) for batch in all_batches(source)] == [[6, 7], [8, 9], [10, 11, 12, 13], [14]]
    assert list(source.batches(0, 0, 1)) == []
    assert not source.keeps_order
    assert rows_in([source.first_batch()]) == [6, 7]


def test_a_feed_may_map_what_it_has_not_dropped(reader: Reader, tmp_path: Path) -> None:
    def large(*given: Any) -> tf.data.Dataset:
        return feed(*given).filter(lambda x, _: x > 5).map(lambda x, y: (x + 1, y))

    source = adapted(Records(reader, large), tmp_path)
    assert rows_in([source.first_batch()]) == [7, 8]


def test_a_feed_that_multiplies_records_makes_long_batches(reader: Reader, tmp_path: Path) -> None:
    def twice(*given: Any) -> tf.data.Dataset:
        return feed(*given).map(lambda x, y: (tf.stack([x, x]), tf.stack([y, y]))).unbatch()

    source = adapted(Records(reader, twice), tmp_path)
    assert rows_in(list(source.batches(0, 2, 4))) == [8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13]


def test_a_reader_with_a_default_feed_needs_no_records(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(6.0), y=np.arange(6))
    reader = open_reader(str(tmp_path / "a.npz"))
    source = copy_of(adapted(reader, tmp_path, class_weight={0: 2.0, 5: 3.0}))
    features, labels, weights = next(source.batches(0, 1, 2))
    assert_same_batches([(features, labels)], [(np.array([4.0, 5.0]), np.array([4, 5]))])
    np.testing.assert_array_equal(weights, [1, 3])
    predicted = adapted(reader, tmp_path, purpose="predict", batch_size=None)
    assert_same_batches(all_batches(predicted), [np.arange(6.0)])


def test_what_a_reader_knows_of_opened_files_is_not_sent(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((10000, 10)), y=np.zeros(10000))
    reader = open_reader(str(tmp_path / "a.npz"))
    source = adapted(reader, tmp_path)
    first = all_batches(source)[0]
    assert len(carry.dumps(source, "a source")) < 10_000
    assert_same_batches([copy_of(source).first_batch()], [first])


def test_steps_go_on_in_fit_and_limit_elsewhere(reader: Reader, tmp_path: Path) -> None:
    source = adapted(Records(reader, feed), tmp_path, steps=3)
    assert rows_in(all_batches(source, 1)) == [10, 11, 12, 13, 14]
    assert rows_in(all_batches(adapted(Records(reader, feed), tmp_path, steps=2, purpose="evaluate"))) == list(range(8))


def test_feeds_that_cannot_work_are_refused_in_words(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="columns of the records are not known"):
        adapted(reader, tmp_path).first_batch()
    with pytest.raises(ModelFileError, match=r"`feed` of .* batches, but"):
        adapted(Records(reader, lambda *given: feed(*given).batch(2)), tmp_path).first_batch()
    with pytest.raises(ModelFileError, match=r"raised KeyError.*\n.*is string \[\] \(a line of text"):
        adapted(Records(reader, lambda *_: {}["no"]), tmp_path).first_batch()
    with pytest.raises(ModelFileError, match=r"expected a tf.data.Dataset"):
        adapted(Records(reader, lambda *_: 1), tmp_path).first_batch()
    with pytest.raises(DataError, match=r"Records \[8, 10\) of .* can't be converted to batches"):
        next(
            adapted(
                Records(reader, lambda ds, *_: ds.map(lambda line: 1 // (tf.strings.length(line) - 3))), tmp_path
            ).batches(0, 2, 3)
        )
    with pytest.raises(TypeError, match=r"must be an elasticcb.data.Reader"):
        Records("file.csv")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`feed` must be a callable"):
        Records(reader, 3)  # type: ignore[arg-type]


def test_a_header_that_was_not_announced_is_shown_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "songs.csv").write_text("user,plays\n1,0.5\n")
    reader = open_reader(str(tmp_path / "songs.csv"))

    def feed(dataset: tf.data.Dataset, *_: object) -> tf.data.Dataset:
        return dataset.map(lambda line: tuple(tf.io.decode_csv(line, [0, 0.0])))

    hint = r"songs\.csv is: user,plays\nIf that is a header, set the reader parameter header=true"
    with pytest.raises(DataError, match=rf"int32: user\.(?s:.*){hint}") as raised:
        adapted(Records(reader, feed), tmp_path).first_batch()
    assert "[[" not in str(raised.value)

    def by_name(dataset: tf.data.Dataset, mode: str, metadata: Any) -> tf.data.Dataset:
        return dataset.map(lambda line: dict(zip(metadata.column_names, [line, line], strict=False))["plays"])

    with pytest.raises(ModelFileError, match=rf"raised KeyError: 'plays'(?s:.*){hint}"):
        adapted(Records(reader, by_name), tmp_path).first_batch()


def test_a_missing_column_is_an_error_with_the_columns_there_are_and_the_line_of_the_feed(tmp_path: Path) -> None:
    (tmp_path / "songs.csv").write_text("user,plays\n1,0.5\n")
    reader = open_reader(str(tmp_path / "songs.csv"), {"header": True})

    def feed(dataset: tf.data.Dataset, mode: str, metadata: Any) -> tf.data.Dataset:
        def parse(line: Any) -> Any:
            values = dict(zip(metadata.column_names, tf.io.decode_csv(line, [0, 0.0]), strict=True))
            if mode:  # AutoGraph converts this function
                return values["price"]
            return line

        return dataset.map(parse)

    expected = r"raised KeyError: 'price'(?s:.*)The columns are: user, plays\."
    with pytest.raises(ModelFileError, match=expected) as raised:
        adapted(Records(reader, feed), tmp_path).first_batch()
    shown = raised.value.user_traceback
    assert 'return values["price"]' in shown
    assert shown.endswith("\nKeyError: 'price'\n")
    assert "autograph" not in shown
    assert shown.count("in parse") == 1


def test_labels_beside_a_reader_are_refused_in_the_words_of_keras(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`y` should not be passed. Instead, the targets should be included"):
        adapt(reader, np.zeros(15), purpose="fit", folder=tmp_path, seed=1)


def test_lists_of_varying_length_are_ragged_in_each_batch(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = arrow.table({"seen": [[i] * (i % 3) for i in range(10)], "y": np.arange(10)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    reader = open_reader(str(tmp_path / "a.parquet"))
    source = adapted(read(reader, label="y"), tmp_path)
    x, y = next(iter(copy_of(source).batches(0, 1, 2)))
    assert (x["seen"].to_list(), y.numpy().tolist()) == ([[4], [5, 5], [], [7]], [4, 5, 6, 7])
    dropping = Records(reader, lambda dataset, *_: dataset.filter(lambda row: row["y"] != 5))
    (rows,) = adapted(dropping, tmp_path).batches(0, 1, 2)
    assert rows["seen"].to_list() == [[4], [], [7]]
