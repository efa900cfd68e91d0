"""Masters of real jobs, killed and interrupted: others go on with their jobs."""

import json
import re
import shutil

import numpy as np
import psutil
import pytest

from jobs import linear_data, number, train_flags, write_model_file

MODEL_FILE = """
    import keras

    def custom_model():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return keras.optimizers.SGD(0.01)

    def eval_metrics_fn():
        return {"rows": Rows()}

    class Rows(keras.metrics.Sum):
        "Counts the records that were evaluated."

        def update_state(self, labels, predictions, sample_weight=None):
            super().update_state(keras.ops.ones_like(labels))

    class Epochs(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ended = []

        def on_epoch_end(self, epoch, logs=None):
            self.ended = [*self.ended, epoch]
            with open(self.params["job_directory"] + "/epochs", "a") as file:
                print(epoch, self.ended, sorted(logs), file=file)

    def callbacks():
        return [Epochs()]
"""
RECORDS, TESTED = 8_000, 500


@pytest.fixture
def data(tmp_path):
    """Records of a linear function, and a model file for them."""
    write_model_file(tmp_path, MODEL_FILE, "linear")
    linear_data(tmp_path, train=RECORDS, test=TESTED)
    return tmp_path


def flags(folder, **more):
    return ["train", *train_flags(folder, "linear", **{"num_ps": 2, "checkpoint_interval": 0.2, **more})]


def master_of(job):
    """The process that the launcher has started."""
    return psutil.Process(job.process.pid).children()[0]


def test_killed_master_is_replaced_and_no_record_is_lost(data, start_job):
    job = start_job(*flags(data, num_epochs=3, output=data / "model"))
    job.wait_for_line(r"Evaluation at version")
    master_of(job).kill()
    job.wait_for_line(r"another one goes on with the job")
    job.wait_for_line(r"Parameter server 1 goes on from its recovery files")
    job.wait_for_line(r"Evaluation at version")
    master_of(job).kill()
    assert job.finish() == 0, job.output
    for epoch in (1, 2, 3):
        assert number(job.output, f"records trained in epoch {epoch}") == RECORDS
    assert number(job.output, "records evaluated, once each") == TESTED
    assert {int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)} == {TESTED}
    assert (data / "model" / "saved_model.pb").is_file()
    assert not (data / "job" / "recovery").exists()
    assert json.loads((data / "job" / "job.json").read_text())["training"]["minibatch_size"] == 8
    lines = (data / "job" / "epochs").read_text().splitlines()
    # An end of an epoch that had begun when the master was killed may come again; what callbacks remember goes on.
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == ["0", "1", "2"]
    assert lines[-1].startswith("2 [0, 1, 2]")
    assert "'val_rows'" in lines[-1]
    job.assert_no_orphans()

    again = start_job("resume", str(data / "job"))
    assert again.finish() == 2
    assert "is done; there is nothing to go on with" in again.output


def test_synchronous_servers_are_started_anew_together(data, start_job):
    more = {"use_async": "false", "grads_to_wait": 2, "sync_version_tolerance": 1}
    job = start_job(*flags(data, num_epochs=2, **more))
    job.wait_for_line(r"Evaluation at version")
    job.kill("ps", 1)
    job.wait_for_line(r"The master ended; another one goes on with the job")
    assert job.finish() == 0, job.output
    for epoch in (1, 2):
        assert number(job.output, f"records trained in epoch {epoch}") == RECORDS
    assert "Traceback" not in job.output
    job.assert_no_orphans()


def test_interrupted_job_is_resumed_without_a_loss(data, start_job):
    job = start_job(*flags(data, num_epochs=4, checkpoint_interval=1000))
    job.wait_for_line(r"training: epoch 2/4, .*records/s")
    job.interrupt()
    assert job.finish() == 130
    version = int(re.search(r"interrupted at version (\d+)", job.output)[1])
    assert "elasticcb resume" in job.output
    job.assert_no_orphans()

    again = start_job("resume", str(data / "job"))
    assert again.finish() == 0, again.output
    assert re.findall(r"goes on from its recovery files; (\d+) updates", again.output) == ["0", "0"]
    for epoch in (1, 2, 3, 4):
        assert number(again.output, f"records trained in epoch {epoch}") == RECORDS
    assert number(again.output, "model version") >= 4 * RECORDS // 8 > version


def test_job_that_can_not_be_resumed_is_refused_in_words(data, start_job):
    for folder, words in (("nowhere", "is no folder"), (".", "holds no settings of a job")):
        job = start_job("resume", str(data / folder))
        assert job.finish() == 2
        assert words in job.output
    job = start_job(*flags(data, num_epochs=9))
    job.wait_for_line(r"Evaluation at version")
    job.interrupt()
    job.finish()
    shutil.copytree(data / "job", data / "moved")
    moved = start_job("resume", str(data / "moved"))
    assert moved.finish() == 2
    assert "Move it back" in moved.output
    with np.load(data / "train.npz") as arrays:
        shorter = {name: array[:-100] for name, array in arrays.items()}
    np.savez(data / "train.npz", **shorter)
    changed = start_job("resume", str(data / "job"))
    assert changed.finish() == 1
    assert "The training data have changed: 8,000 records in 1 sources when the job began, 7,900" in changed.output
