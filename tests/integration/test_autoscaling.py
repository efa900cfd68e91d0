"""The number of workers follows the throughput of a real job."""

from elasticcb.cli.main import main as elasticcb_main
from jobs import LINEAR_MODEL, linear_data, train_flags, write_model_file

CALLBACKS = """
    import fcntl
    import os
    import time

    class OneAtATime(keras.callbacks.Callback):
        "All workers share something that one batch at a time can use."

        def on_train_batch_begin(self, batch, logs=None):
            self.file = open(os.environ["SHARED"], "a")
            fcntl.flock(self.file, fcntl.LOCK_EX)

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.1)  # most of a batch's time, however busy the machine is
            self.file.close()

    def callbacks():
        return [OneAtATime()]
"""


def test_worker_that_brings_nothing_is_given_back(tmp_path, start_job, monkeypatch, capsys):
    write_model_file(tmp_path, LINEAR_MODEL + CALLBACKS, "shared")
    linear_data(tmp_path, train=200_000)
    monkeypatch.setenv("SHARED", str(tmp_path / "lock"))
    flags = [flag for flag in train_flags(tmp_path, "shared", autoscale="1..2") if "validation" not in flag]
    job = start_job("train", *(flag for flag in flags if "num_workers" not in flag))
    job.wait_for_line(r"Autoscale: 1 -> 2 workers: 1 does [\d,]+ records/s\.")
    job.wait_for_line(r"workers 2/2")
    job.wait_for_line(r"Autoscale: 2 -> 1 worker: 2 do [\d,]+ records/s, [\d.]+ times the .* which is not enough\.")
    job.wait_for_line(r"workers 1/1")
    assert elasticcb_main(["scale", str(tmp_path / "job"), "--workers=2"]) == 0
    job.wait_for_line(r"Autoscale: off, since the number of workers was set by hand\.")
    capsys.readouterr()
    job.interrupt()
    assert job.finish() == 130, job.output
    job.assert_no_orphans()
