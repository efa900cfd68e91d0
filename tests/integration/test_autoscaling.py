"""The number of workers follows the throughput of a real job."""

import re
import threading

import pytest

from elasticcb.cli.main import main as elasticcb_main
from elasticcb.master import autoscaler
from elasticcb.settings.choices import WorkerRange
from jobs import LINEAR_MODEL, RecordingDisplay, job_settings, linear_data, run_job, write_model_file

CALLBACKS = """
    import fcntl
    import os
    import time

    FOLDER = os.path.dirname(__file__)

    class OneAtATime(keras.callbacks.Callback):
        "All workers share something that one batch at a time can use."

        def on_train_batch_begin(self, batch, logs=None):
            self.file = open(FOLDER + "/shared", "a")
            fcntl.flock(self.file, fcntl.LOCK_EX)

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.15)  # most of a batch's time, however busy the machine is
            self.file.close()

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = os.path.exists(FOLDER + "/enough")

    def callbacks():
        return [OneAtATime(), Ends()]
"""


class Person(RecordingDisplay):
    """Asks for two workers when one has been given back; has seen enough when that is answered."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.codes = []
        self.workers = []  # up, and planned

    def update(self, status):
        super().update(status)
        workers = (status.workers.up, status.workers.planned)
        if self.workers[-1:] != [workers]:
            self.workers.append(workers)
            if workers == (1, 1) and (2, 2) in self.workers:
                threading.Thread(target=self.scale).start()

    def message(self, text):
        super().message(text)
        if "Autoscale: off" in text:
            (self.folder / "enough").touch()

    def scale(self):
        self.codes.append(elasticcb_main(["scale", str(self.folder / "job"), "--workers=2"]))


@pytest.mark.deep  # tests/master/test_autoscaler.py has the decisions
def test_worker_that_brings_nothing_is_given_back(tmp_path, monkeypatch, faults):
    faults.shorten("elasticcb.clients.progress_reporter._REPORT_SECONDS", 0.1)  # so that short samples are alike
    monkeypatch.setattr(autoscaler, "_WARM_UP_SECONDS", 1.0)
    monkeypatch.setattr(autoscaler, "_SAMPLE_SECONDS", 1.0)
    monkeypatch.setattr(autoscaler, "_PRECISION", 0.1)
    path = write_model_file(tmp_path, LINEAR_MODEL + CALLBACKS, "shared")
    linear_data(tmp_path, train=200_000)
    settings = job_settings(
        path,
        tmp_path / "job",
        kind="local",
        training=str(tmp_path / "train.npz"),
        minibatch_size=8,
        num_minibatches_per_task=25,
        num_workers=1,
        autoscale=WorkerRange(1, 2),
        updates="async",  # each batch counts by itself, so that short samples are alike
    )
    person = Person(tmp_path)
    run_job(settings, person)
    told = [text for text in person.messages if text.startswith("Autoscale")]
    for pattern, text in zip(
        (
            r"Autoscale: 1 -> 2 workers: 1 does [\d,]+ records/s\.",
            r"Autoscale: 2 -> 1 worker: 2 do [\d,]+ records/s, [\d.]+ times the .* which is not enough\.",
            r"Autoscale: off, because the number of workers was set manually\.",
        ),
        told,
        strict=True,
    ):
        assert re.match(pattern, text), told
    assert person.codes == [0]
