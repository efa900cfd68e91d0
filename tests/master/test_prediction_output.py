"""Predictions become one file: in the order of the data, each record once, complete or not there."""

import json

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import tensorflow as tf

from elasticcb.errors import JobFailedError, ModelFileError
from elasticcb.master.prediction_output import PredictionOutput
from elasticcb.master.shards import Shard
from elasticcb.model.metric_messages import flatten_outputs
from elasticcb.predictions.files import check, columns_of
from elasticcb.settings.choices import PREDICTION_FORMATS

SOURCES = [("a", 5), ("b", 3)]
# Of sources and the first record of each task; in no order, one of them twice.
TASKS = [("b", 0, 3), ("a", 3, 5), ("a", 0, 3), ("b", 0, 3)]
POSITIONS = np.arange(8)


def outputs(first, last):
    numbers = np.arange(first, last)
    return {
        "id": numbers,
        "score": (numbers / 10).astype("float32"),
        "one": numbers[:, None].astype("float64"),
        "pair": np.stack([numbers, -numbers], 1).astype(ml_dtypes.bfloat16),
        "grid": np.repeat(numbers, 6).reshape(-1, 2, 3).astype("float32"),
    }


def write(folder, format, of_batch=outputs, tasks=TASKS):
    """Tasks of two batches each."""
    output = PredictionOutput(folder / "new" / f"predictions.{format}", format, folder / "job", SOURCES, ())
    starts = dict(zip("ab", (0, 5), strict=True))
    for name, start, end in tasks:
        bounds = [starts[name] + position for position in (start, end - 1, end)]
        batches = [flatten_outputs(of_batch(*bounds[i : i + 2])) for i in range(2)]
        staged = output.stage(batches)
        output.commit(staged, Shard(name, start, end), batches)
    output.discard(output.stage([flatten_outputs(of_batch(0, 1))]))  # its report was refused
    output.finish()
    output.remove()
    assert [path.name for path in output.path.parent.iterdir()] == [output.path.name]
    assert not list((folder / "job").iterdir())
    return output.path


def test_csv_has_a_column_for_each_number_and_json_where_there_are_more_dimensions(tmp_path):
    path = write(tmp_path, "csv")
    assert path.read_text().splitlines()[:3] == [
        "record,id,score,one,pair_0,pair_1,grid",
        '0,0,0.0,0.0,0.0,0.0,"[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]"',
        '1,1,0.1,1.0,1.0,-1.0,"[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]"',
    ]
    table = pd.read_csv(path)
    np.testing.assert_array_equal(table["record"], POSITIONS)
    np.testing.assert_array_equal(table["score"].astype("float32"), outputs(0, 8)["score"])


def test_json_lines_parquet_and_numpy_keep_shapes_and_dtypes(tmp_path):
    expected = {name: value.tolist() for name, value in outputs(0, 8).items()}
    expected["one"] = POSITIONS.tolist()  # of shape (8, 1)
    lines = [json.loads(line) for line in write(tmp_path / "l", "jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(write(tmp_path / "p", "parquet")).to_pydict()
    arrays = np.load(write(tmp_path / "n", "npz"))
    assert [line["record"] for line in lines] == table["record"] == arrays["record"].tolist() == POSITIONS.tolist()
    for name in ("id", "one", "pair", "grid"):
        assert [line[name] for line in lines] == table[name] == arrays[name].tolist() == expected[name]
    assert [line["score"] for line in lines] == [n / 10 for n in range(8)]
    assert arrays["score"].dtype == np.float32
    assert arrays["score"].tolist() == table["score"] == expected["score"]
    assert arrays["pair"].dtype == np.float32


def rows_of_any_length(first, last):
    lengths = [number % 3 for number in range(first, last)]
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(sum(lengths), dtype=tf.float32), lengths)
    return (ragged, np.array([f"é{number}".encode() for number in range(first, last)], object))


def test_ragged_rows_and_text_stay_lists_and_text(tmp_path):
    lines = [json.loads(line) for line in write(tmp_path / "l", "jsonl", rows_of_any_length).read_text().splitlines()]
    table = pyarrow.parquet.read_table(write(tmp_path / "p", "parquet", rows_of_any_length)).to_pydict()
    assert [len(line["output_0"]) for line in lines] == [number % 3 for number in range(8)]
    assert table["output_0"] == [line["output_0"] for line in lines]
    assert table["output_1"] == [line["output_1"] for line in lines] == [f"é{number}" for number in range(8)]
    csv = pd.read_csv(write(tmp_path / "c", "csv", rows_of_any_length))
    assert [json.loads(cell) for cell in csv["output_0"]] == table["output_0"]
    for column in columns_of(flatten_outputs(rows_of_any_length(0, 2))):
        with pytest.raises(ModelFileError, match=r"[uU]se --output_format=jsonl"):
            check(column, "npz")


def test_widths_that_differ_between_batches_are_lists_in_csv_and_refused_by_numpy(tmp_path):
    def padded(first, last):
        return np.ones((last - first, 2 + first % 2))

    assert pd.read_csv(write(tmp_path, "csv", padded))["prediction"][0] == "[1.0, 1.0]"
    with pytest.raises(ModelFileError, match="different shapes"):
        write(tmp_path / "n", "npz", padded)


def test_outputs_of_a_list_have_the_names_of_the_model():
    names = [column.name for column in columns_of(flatten_outputs([np.ones(2), {"x": np.ones(2)}]), ("a", "b"))]
    assert names == ["a", "b.x"]
    (only,) = columns_of(flatten_outputs(np.ones((2, 1))), ("click",))
    assert only.name == "click"


@pytest.mark.parametrize(
    ("of_batch", "message"),
    [
        (lambda first, last: np.float32(1.0), "one number for the whole batch"),
        (lambda first, last: np.ones((1, 2)), "2 rows for the 3 records of b"),
        (lambda first, last: {"record": np.ones(last - first)}, "reserved for the record number"),
        (lambda first, last: tf.sparse.eye(last - first), "tf.sparse.to_dense"),
    ],
)
def test_outputs_without_a_row_per_record_are_refused_in_words(tmp_path, of_batch, message):
    with pytest.raises(ModelFileError, match=message):
        write(tmp_path, "csv", of_batch)


def committed(folder, format="csv", target=None, rows=8):
    """All that `finish` needs; without the last rows if there are fewer than 8."""
    path = target or folder / f"out.{format}"
    output = PredictionOutput(path, format, folder / "job", SOURCES, ())
    for name, start, first, last in (("a", 0, 0, 5), ("b", 0, 5, rows)):
        if first < last:
            batches = [flatten_outputs({"id": np.arange(first, last)})]
            output.commit(output.stage(batches), Shard(name, start, last - first), batches)
    return output


@pytest.mark.parametrize("format", PREDICTION_FORMATS)
def test_file_that_somebody_else_made_stays_and_the_predictions_are_in_the_job_folder(tmp_path, format):
    output = committed(tmp_path, format)
    output.path.write_text("of somebody else")
    (tmp_path / "job" / output.path.name).write_text("of somebody else, too")
    kept = tmp_path / "job" / f"out-2.{format}"
    with pytest.raises(JobFailedError, match=f"a file with this name has appeared.*They are in {kept}"):
        output.finish()
    output.remove()
    assert output.path.read_text() == "of somebody else"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", f"out.{format}"]
    assert sorted(path.name for path in kept.parent.iterdir()) == [kept.name, output.path.name]
    committed(tmp_path / "again", format).finish()
    assert kept.read_bytes() == (tmp_path / "again" / f"out.{format}").read_bytes()


def test_predictions_whose_folder_is_gone_are_in_the_job_folder(tmp_path):
    (tmp_path / "no-folder").write_text("")
    output = committed(tmp_path, target=tmp_path / "no-folder" / "out.csv")
    with pytest.raises(JobFailedError, match=f"They are in {tmp_path / 'job' / 'out.csv'}"):
        output.finish()
    assert len(pd.read_csv(tmp_path / "job" / "out.csv")) == 8


def test_file_is_not_written_when_a_part_of_it_is_missing(tmp_path):
    for number, gap in enumerate(["part-000000000000000", "part-000000000000005"]):
        output = committed(tmp_path / str(number))
        (tmp_path / str(number) / "job" / "predictions" / gap).unlink()
        with pytest.raises(JobFailedError, match="of 8 in all"):
            output.finish()
        output.remove()
        assert not [path for path in (tmp_path / str(number)).rglob("*") if path.is_file()]


def test_report_whose_part_cannot_be_kept_fails_the_job(tmp_path):
    output = committed(tmp_path, rows=5)
    batches = [flatten_outputs({"id": np.arange(3)})]
    staged = output.stage(batches)
    staged.unlink()
    with pytest.raises(JobFailedError, match="can't be written"):
        output.commit(staged, Shard("b", 0, 3), batches)


def test_row_groups_of_parquet_hold_many_batches(tmp_path):
    rows = 1000
    output = PredictionOutput(tmp_path / "out.parquet", "parquet", tmp_path / "job", [("a", 300 * rows)], ())
    for task in range(3):
        batches = [flatten_outputs({"id": np.arange(rows)}) for _ in range(100)]
        output.commit(output.stage(batches), Shard("a", 100 * task * rows, 100 * (task + 1) * rows), batches)
    output.finish()
    file = pyarrow.parquet.ParquetFile(output.path)
    assert file.num_row_groups == 3
    assert file.read().column("record").to_pylist() == list(range(300 * rows))
