"""Masters of real jobs, killed and interrupted: others go on with their jobs."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest

from elasticcb.cli.job_folders import known_jobs
from elasticcb.cli.main import main
from elasticcb.storage import durable
from jobs import LINEAR_MODEL, linear_data, number, records_trained, train_flags, write_model_file
from metrics_scrapes import Scrape

CALLBACKS = """
    class Epochs(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ended = []

        def on_epoch_end(self, epoch, logs=None):
            self.ended = [*self.ended, epoch]
            with open(self.params["job_directory"] + "/epochs", "a") as file:
                print(epoch, self.ended, sorted(logs), file=file)

    def callbacks():
        return [Pace(), Epochs()]
"""
PACE = """
    import os
    import time

    class Pace(keras.callbacks.Callback):
        "Makes few batches, which cost little, last long enough for what a test does meanwhile, or while it holds them."

        def on_train_batch_begin(self, version, logs=None):
            time.sleep(0.01)
            while os.path.exists(os.environ.get("HELD_BY", "")):
                time.sleep(0.05)
"""
RECORDS, TESTED = 1_200, 200


@pytest.fixture
def data(tmp_path):
    """Records of a linear function, and a model file for them."""
    write_model_file(tmp_path, LINEAR_MODEL + PACE + CALLBACKS, "linear")
    linear_data(tmp_path, train=RECORDS, test=TESTED)
    return tmp_path


def flags(folder, **more):
    return ["train", *train_flags(folder, "linear", **{"num_ps": 2, "checkpoint_interval": 0.2, **more})]


def others(job):
    """Ids of workers and servers."""
    return [process.pid for role in ("worker", "ps") for process in job.children(role)]


def test_killed_master_is_replaced_while_workers_and_servers_go_on(data, start_job, capsys):
    job = start_job(*flags(data, num_epochs=4, output=data / "model", metrics_port=0))
    metrics = re.search(r"http://(\S+)/metrics", job.wait_for_line(r"Metrics are served at"))[1]
    job.wait_for_line(r"Evaluation at version")
    begun = time.monotonic()
    before, counted = others(job), Scrape(metrics)
    job.master.kill()
    job.wait_for_line(r"a new one continues the job\.")
    job.wait_for_line(r"starting: ")
    job.master.kill()  # before it has built its model
    job.wait_for_line(r"a new one continues the job\.")
    job.wait_for_line(r"recovered in .*; 2 workers and 2 parameter servers kept running")
    job.wait_for_line(r"Evaluation at version")
    job.master.kill()
    job.wait_for_line(r"recovered in")
    until_now = time.monotonic() - begun
    later = Scrape(metrics)  # at the same port; what was counted goes on
    assert later.find("elasticcb_ready") == 1
    for kind in ("training", "evaluation"):
        first, second = (each.find("elasticcb_records_total", type=kind) for each in (counted, later))
        assert second >= first > 0
    assert others(job) == before
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 4
    # Each batch was applied once.
    assert number(job.output, "duplicate records (at most)") == 0
    assert number(job.output, "model version") == 4 * RECORDS // 8
    assert number(job.output, "Training is done, in") >= int(until_now)
    assert number(job.output, "records evaluated, once each") == TESTED
    assert {int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)} == {TESTED}
    assert "Traceback" not in job.output
    assert (data / "model" / "saved_model.pb").is_file()
    assert not (data / "job" / "recovery").exists()
    assert json.loads((data / "job" / "job.json").read_text())["training"]["minibatch_size"] == 8
    lines = (data / "job" / "epochs").read_text().splitlines()
    # An end of an epoch that had begun when the master was killed may come again; what callbacks remember goes on.
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == ["0", "1", "2", "3"]
    assert lines[-1].startswith("3 [0, 1, 2, 3]")
    assert "'val_rows'" in lines[-1]
    job.assert_no_orphans()

    assert main(["resume", str(data / "job")]) == 2
    assert "is done; there is nothing to continue" in capsys.readouterr().err


REMEMBERS = """
    import os
    import signal

    import numpy as np

    class Begins(keras.callbacks.Callback):
        "What it sets on the model counts once, however often it is called."

        def note(self, *words):
            with open(self.params["job_directory"] + "/begins", "a") as file:
                print(*words, file=file)

        def on_train_begin(self, logs=None):
            self.note("train")
            self.epochs = []
            self.model.set_weights([np.full_like(weight, 25.0) for weight in self.model.get_weights()])

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs.append((epoch, float(self.model.optimizer.learning_rate.numpy())))

        def on_epoch_end(self, epoch, logs=None):
            self.note(epoch, *(f"{epoch}:{rate:.5g}" for epoch, rate in self.epochs), self.model.get_weights()[0].max())

    class Dies(keras.callbacks.Callback):
        "Kills the master after a hook has set the rate and before the journal has it: at each of the two hooks, once."

        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5
            self.die("end", epoch == 1)

        def on_epoch_begin(self, epoch, logs=None):
            self.die("begin", epoch == 2)

        def die(self, hook, is_due):
            died = self.params["job_directory"] + "/died at " + hook
            if is_due and not os.path.exists(died):
                open(died, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    def callbacks():
        halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        return [Pace(), halves, Dies(), keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=4), Begins()]
"""


def test_callbacks_that_are_interrupted_end_training_where_they_would_have(data, start_job):
    write_model_file(data, LINEAR_MODEL + PACE + REMEMBERS, "remembers")
    job = start_job(*[flag.replace("linear.", "remembers.") for flag in flags(data, num_epochs=30, num_ps=1)])
    for _ in range(2):
        job.wait_for_line(r"recovered in")
    job.wait_for_line(r"Evaluation at version")
    job.interrupt()
    assert job.finish() == 130

    again = start_job("resume", str(data / "job"))
    assert again.finish() == 0, again.output
    assert "EarlyStopping.on_epoch_end set model.stop_training" in again.output
    # The first epoch sets the mark, four do not reach it; weights that were set are a version of their own, once.
    again_trained = number(again.output, "duplicate records (at most)")
    assert 0 <= number(again.output, "model version") - (5 * RECORDS // 8 + 1) <= again_trained // 8
    assert len(records_trained(again.output)) == 5
    lines = [line.split() for line in (data / "job" / "begins").read_text().splitlines()]
    assert lines.count(["train"]) == 4
    ends = {int(first): rest for first, *rest in lines if first != "train"}
    rates = [f"{epoch}:{0.01 * 0.5 ** (2 * epoch + 1):.5g}" for epoch in range(5)]
    for epoch, (*begun, weight) in ends.items():
        assert begun == rates[: epoch + 1]
        assert float(weight) < 15  # by the first epoch's end
    assert list(ends) == [0, 1, 2, 3, 4]


def test_processes_killed_with_the_master_are_replaced_and_all_when_the_one_that_forks_is_among_them(data, start_job):
    job = start_job(*flags(data, num_epochs=4))
    job.wait_for_line(r"Evaluation at version")
    before = others(job)
    job.master.suspend()
    killed = [job.children("ps")[1], job.children("worker")[0]]
    for process in killed:
        process.kill()
    assert not psutil.wait_procs(killed, 60)[1]
    job.master.kill()
    job.wait_for_line(r"parameter server 1 .* was lost: it exited while there was no master")
    job.wait_for_line(r"Parameter server 1 recovered")
    job.wait_for_line(r"recovered in .*; 1 worker and 1 parameter server kept running")
    assert len(set(others(job)) & set(before)) == 2

    job.wait_for_line(r"Evaluation at version")
    before = others(job)
    job.master.parent().kill()
    job.kill("worker", 0)
    job.wait_for_line(r"worker 0 .* was lost")
    job.master.kill()
    job.wait_for_line(r"a new one continues the job with new processes")
    job.wait_for_line(r"Parameter server 1 resumes from its recovery files")
    assert not set(others(job)) & set(before)
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 4
    assert number(job.output, "parameter servers lost") == 1
    assert number(job.output, "workers lost") == 2  # as the masters saw
    lost = sum(int(n.replace(",", "")) for n in re.findall(r"; ([\d,]+) updates? to its shard", job.output))
    assert number(job.output, "updates lost with them") == lost
    assert {int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)} == {TESTED}
    job.assert_no_orphans()


@pytest.mark.deep
def test_master_killed_while_the_process_that_forks_hangs_is_replaced(data, start_job):
    job = start_job(*flags(data, num_epochs=2))
    job.wait_for_line(r"Evaluation at version")
    master = job.master
    master.parent().suspend()
    master.kill()
    job.wait_for_line(r"a new one continues the job with new processes")
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 2
    job.assert_no_orphans()


def test_interrupted_job_is_resumed_without_a_loss_where_it_can_be(data, start_job, capsys):
    job = start_job(*flags(data, num_epochs=4, checkpoint_interval=1000, checkpoint_dir=data / "ckpt"))
    job.wait_for_line(r"Evaluation at version")
    job.interrupt()
    assert job.finish() == 130, job.output
    version = int(re.search(r"interrupted at version (\d+)", job.output)[1])
    assert "elasticcb resume" in job.output
    assert "Traceback" not in job.output
    assert list((data / "ckpt").glob("version-*/manifest.json"))
    job.assert_no_orphans()

    shutil.copytree(data / "job", data / "moved")
    for folder, words in (
        ("nowhere", "There is no job"), (".", "is not the folder of a job"), ("moved", "Move it back"),
    ):  # fmt: skip
        assert main(["resume", str(data / folder)]) == 2
        assert words in capsys.readouterr().err
    whole = (data / "train.npz").read_bytes()
    with np.load(data / "train.npz") as arrays:
        shorter = {name: array[:-100] for name, array in arrays.items()}
    np.savez(data / "train.npz", **shorter)
    listed = known_jobs(data)
    changed = start_job("resume", str(data / "job"))
    assert changed.finish() == 1
    assert (
        "The training data has changed: 1,200 records in 1 source when the job started, 1,100 records" in changed.output
    )
    assert known_jobs(data) == listed
    (data / "train.npz").write_bytes(whole)

    again = start_job("resume", str(data / "job"))
    again.wait_for_line(r"Evaluation at version")
    for _ in range(2):  # the shell's and the kernel's, when a terminal is closed
        again.process.send_signal(signal.SIGHUP)
    assert again.finish() == 130, again.output
    assert re.findall(r"resumes from its recovery files; (\d+) updates", again.output) == ["0", "0"]

    # Without recovery files, from the newest checkpoint of the job.
    newest = max((data / "ckpt").glob("version-*"))
    shutil.copytree(newest, data / "ckpt" / "version-99999999")  # which another job has left there
    manifest = durable.read_document(newest / "manifest.json")
    durable.write_document(data / "ckpt" / "version-99999999" / "manifest.json", manifest | {"extra": {"run": "other"}})
    shutil.rmtree(data / "job" / "recovery")
    last = start_job("resume", str(data / "job"))
    assert last.finish() == 0, last.output
    assert re.findall(rf"resumes from {newest}; (\d+) updates", last.output) == ["0", "0"], last.output
    assert records_trained(last.output) == [RECORDS] * 4
    assert number(last.output, "model version") >= 4 * RECORDS // 8 > version


@pytest.mark.deep
def test_sigterm_to_all_processes_at_once_loses_nothing(data, start_job):
    """As from a service manager."""
    job = start_job(*flags(data, num_epochs=8, checkpoint_dir=data / "ckpt"))
    job.wait_for_line(r"Evaluation at version")
    for process in [job.process, *job.children()]:
        process.send_signal(signal.SIGTERM)
    assert job.finish() == 130, job.output
    assert list((data / "ckpt").glob("version-*/manifest.json")), job.output
    job.assert_no_orphans()
    again = start_job("resume", str(data / "job"))
    assert again.finish() == 0, again.output
    assert number(again.output, "duplicate records (at most)") == 0
    assert records_trained(again.output) == [RECORDS] * 8


def test_a_folder_has_one_job_and_a_master_that_was_cut_off_can_not_act(data, start_job, monkeypatch):
    first, second = data / "hold", data / "hold again"
    monkeypatch.setenv("HELD_BY", str(first))
    checkpoints = {"checkpoint_dir": data / "checkpoints", "checkpoint_steps": 100, "num_ps": 1}
    job = start_job(*flags(data, num_epochs=5, silence_seconds=5, **checkpoints))
    job.wait_for_line(r"Evaluation at version")
    first.touch()
    elsewhere = [flag.replace(f"--job_dir={data / 'job'}", f"--job_dir={data / 'other'}") for flag in flags(data)]
    others = [
        start_job("resume", str(data / "job")),
        start_job(*flags(data, num_epochs=1)),
        start_job(*elsewhere, f"--checkpoint_dir={data / 'checkpoints'}"),
    ]
    for other in others:
        assert other.finish() == 2, other.output
        assert re.search(r"is in use by process \d+ on .*; two jobs would delete each other's files", other.output)
    first.unlink()
    job.wait_for_line(r"Evaluation at version")
    old = job.master
    old.suspend()
    for lock in ("job/.lock", "checkpoints/.checkpoints.lock"):  # as on a file system that knows no locks
        (data / lock).unlink()
    monkeypatch.setenv("HELD_BY", str(second))
    new = start_job("resume", str(data / "job"))
    new.wait_for_line(r"resumes from its recovery files")
    new.wait_for_line(r"Evaluation at version")
    second.touch()
    old.resume()
    assert job.finish() == 1
    assert "Another master took over the job" in job.output, job.output
    assert not (data / "job" / "status.json").exists()
    assert (data / "job" / "master.json").exists()
    second.unlink()
    assert new.finish() == 0, new.output
    assert records_trained(new.output) == [RECORDS] * 5
    assert json.loads((data / "job" / "status.json").read_text())["phase"] == "done"


@pytest.mark.deep  # tests/storage/test_durable.py has the journal
def test_job_on_a_full_disk_ends_with_what_to_do_and_goes_on_when_there_is_room(data, start_job):
    disk = data / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        job = start_job(*flags(data, num_epochs=4, num_ps=1, job_dir=disk / "job"))
        for _ in range(2):
            job.wait_for_line(r"Evaluation at version")
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        assert job.finish() == 1, job.output
        assert re.search(r"The journal .* can't be written: .*No space left.*Free disk space", job.output)
        assert "elasticcb resume" in job.output
        (disk / "filler").unlink()
        again = start_job("resume", str(disk / "job"))
        assert again.finish() == 0, again.output
        assert records_trained(again.output) == [RECORDS] * 4
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
