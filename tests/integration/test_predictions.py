"""`elasticcb predict`: nothing that was predicted is lost, whoever takes it, and whoever leaves meanwhile."""

import csv
import json

import numpy as np
import pytest

from elasticcb.errors import ModelFileError
from elasticcb.settings import Command
from jobs import job_settings, run_job, write_model_file

RECORDS = 600

MODEL = """
    import keras

    def custom_model():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
"""

# Each worker keeps what it predicts in memory until it ends; the first that comes to `WHERE` ends by a signal.
KEEPS = """
    import os
    import signal

    HERE = os.path.dirname(__file__)

    class Keeps(keras.callbacks.Callback):
        def on_predict_begin(self, logs=None):
            self.kept, self.batches = [], 0

        def on_predict_batch_end(self, batch, logs=None):
            self.kept += logs["predictions"][:, 0].tolist()
            self.batches += 1
            if self.batches == 7:
                self.end_once("batch")

        def on_predict_end(self, logs=None):
            if self.params["worker_id"] < 0:
                return
            self.end_once("end")
            with open(os.path.join(HERE, f"kept-{os.getpid()}"), "a") as file:
                file.write("".join(f"{value:.0f}\\n" for value in self.kept))

        def end_once(self, where):
            if where == WHERE:
                try:
                    os.mkdir(os.path.join(HERE, "ended"))
                except FileExistsError:
                    return
                os.kill(os.getpid(), SIGNAL)
                if SIGNAL == signal.SIGKILL:
                    signal.pause()

    def callbacks():
        return [Keeps()]
"""


# The first worker that has predicted some batches kills the server, and goes on when another one holds the model.
def write_numbers(folder, **files):
    """NAME.npz of so many records, numbered over all files, whose prediction is their number."""
    first = 0
    for name, count in files.items():
        x = np.zeros((count, 4), "float32")
        x[:, 0] = np.arange(first, first + count)
        np.savez(folder / f"{name}.npz", x=x)
        first += count


def predict(folder, text, **parts):
    path = write_model_file(folder, text, f"predicts_{abs(hash(folder)) % 10**9}")
    values = {"minibatch_size": 10, "num_minibatches_per_task": 4, "num_workers": 2, "num_ps": 1, **parts}
    summary, display = run_job(job_settings(path, folder / "job", Command.PREDICT, **values))
    return summary, display


def kept(folder):
    return [int(line) for path in folder.glob("kept-*") for line in path.read_text().split()]


@pytest.mark.parametrize(
    ("where", "signal"),
    [pytest.param("batch", "SIGTERM", marks=pytest.mark.deep), ("end", "SIGKILL")],
)
def test_what_callbacks_keep_in_memory_survives_workers_that_end(tmp_path, where, signal):
    write_numbers(tmp_path, numbers=RECORDS)
    text = MODEL + KEEPS.replace("WHERE", repr(where)).replace("SIGNAL", f"signal.{signal}")
    output = {} if signal == "SIGTERM" else {"output": str(tmp_path / "out.csv"), "output_format": "csv"}
    data = str(tmp_path / "numbers.npz")
    summary, _ = predict(tmp_path, text, kind="local", prediction=data, **output)
    assert summary.workers.lost == 1
    assert summary.records_predicted == RECORDS
    if signal == "SIGTERM":
        assert sorted(kept(tmp_path)) == list(range(RECORDS))
        assert summary.records_repeated <= 40  # a task at most
    else:
        assert set(kept(tmp_path)) == set(range(RECORDS))
        assert 0 < summary.records_repeated <= RECORDS
        with open(output["output"], newline="") as file:
            rows = list(csv.reader(file))
        assert rows == [["record", "prediction"], *([str(n), f"{n}.0"] for n in range(RECORDS))]
    assert not [path.name for path in tmp_path.iterdir() if "partial" in path.name]


def test_record_numbers_go_through_all_files_and_outputs_keep_their_names(tmp_path):
    write_numbers(tmp_path, a=45, b=30, c=25)
    text = """
        import keras

        def custom_model():
            x = keras.Input((4,))
            first = keras.layers.Dense(1, kernel_initializer="ones", name="first")(x)
            return keras.Model(x, {"first": first, "all": keras.layers.Reshape((2, 2))(x)})
    """
    path = tmp_path / "made" / "out.jsonl"
    summary, _ = predict(tmp_path, text, prediction=str(tmp_path / "*.npz"), output=str(path), output_format="jsonl")
    assert summary.predictions_path == str(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"record": n, "first": float(n), "all": [[float(n), 0.0], [0.0, 0.0]]} for n in range(100)]
    assert not (tmp_path / "job" / "predictions").exists()


def test_job_that_fails_leaves_no_file(tmp_path):
    write_numbers(tmp_path, numbers=100)
    text = (
        MODEL
        + """
    import tensorflow as tf

    def feed(dataset, mode, metadata):
        def checked(record):
            tf.debugging.assert_less(record["x"][0], 90.0, "too large")
            return record["x"]

        return dataset.map(checked)
    """
    )
    with pytest.raises(Exception, match="too large"):
        predict(
            tmp_path, text, prediction=str(tmp_path / "numbers.npz"), output=str(tmp_path / "out.csv"),
            output_format="csv", max_task_retries=0,
        )  # fmt: skip
    assert not list(tmp_path.glob("*out*"))
    assert not (tmp_path / "job" / "predictions").exists()


@pytest.mark.parametrize(
    ("more", "output", "message"),
    [
        ("def callbacks(): return [keras.callbacks.Callback()]", "", "Nothing would take the predictions"),
        (
            "def feed(d, mode, metadata): return d.map(lambda r: r['x']).filter(lambda x: x[0] > 5)",
            "out.csv",
            "can't be matched to records",
        ),
    ],
)
def test_job_whose_predictions_nobody_would_take_is_refused(tmp_path, more, output, message):
    write_numbers(tmp_path, numbers=100)
    parts = {"output": str(tmp_path / output), "output_format": "csv"} if output else {}
    with pytest.raises(ModelFileError, match=message):
        predict(tmp_path, f"{MODEL}\n    {more}\n", prediction=str(tmp_path / "numbers.npz"), **parts)
