"""Real processes: a job as the command that a user types, with processes killed under it."""

import json
import re
import signal
from pathlib import Path

import pytest

from elasticcb.cli.main import main as elasticcb_main
from jobs import (
    GATE,
    LINEAR_MODEL,
    PACE,
    linear_data,
    number,
    open_gate,
    records_trained,
    train_flags,
    write_model_file,
)
from metrics_scrapes import Scrape, unanswered

CALLBACKS = """
    import os

    class Farewell(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            with open(self.params["job_directory"] + "/train_end", "a") as file:
                file.write(f"{os.getpid()}\\n")

    def callbacks():
        return [Pace(), Farewell()]
"""
RECORDS, TESTED = 1_200, 200
TASK = 80  # records


@pytest.fixture
def data(tmp_path):
    """Records of a linear function, and a model file for them."""
    write_model_file(tmp_path, LINEAR_MODEL + PACE.format(seconds=0.01) + CALLBACKS, "linear")
    linear_data(tmp_path, train=RECORDS, test=TESTED)
    return tmp_path


def flags(folder, **more):
    return train_flags(folder, "linear", **{"num_minibatches_per_task": TASK // 8, **more})


def test_a_killed_worker_is_replaced_and_no_record_is_lost(data, start_job):
    steps = {"num_epochs": 2, "num_ps": 2, "evaluation_steps": 40, "checkpoint_steps": 20}
    more = {"output": data / "model", "metrics_port": 0, "checkpoint_dir": data / "checkpoints", "host": "127.0.0.1"}
    job = start_job("train", *flags(data, **steps, **more))
    metrics = re.search(r"http://(\S+)/metrics", job.wait_for_line(r"Metrics are served at"))[1]
    job.wait_for_line(r"Evaluation at version")
    before = Scrape(metrics)
    job.kill("worker", 1)
    job.wait_for_line(r"restart 1 of")
    assert Scrape(metrics).find("elasticcb_processes_lost_total", role="worker") == 1
    assert job.finish() == 0, job.output

    assert records_trained(job.output) == [RECORDS] * 2
    assert number(job.output, "workers lost") == 1
    assert number(job.output, "duplicate records (at most)") <= 2 * TASK  # two leases at most
    rows = [int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)]
    assert len(rows) > 5
    assert set(rows) == {TESTED}
    assert len((data / "job" / "train_end").read_text().split()) == 1
    assert (data / "model" / "saved_model.pb").is_file()
    job.assert_no_orphans()

    assert before.find("elasticcb_ready") == 1
    assert before.find("elasticcb_model_version") >= 40
    assert before.find("elasticcb_records_total", type="training") > 0
    assert before.find("elasticcb_records_total", type="evaluation") >= TESTED
    assert before.find("elasticcb_exchange_duration_seconds_count", call="push") > 0
    assert before.find("elasticcb_staleness_versions_count") > 0
    for role, index in (("worker", "0"), ("worker", "1"), ("master", "0")):
        assert before.find("elasticcb_cpu_seconds_total", role=role, index=index) > 0
        assert before.find("elasticcb_resident_memory_bytes", role=role, index=index) > 1e6
        assert before.find("elasticcb_certificate_expiry_seconds", role=role, index=index) > 29 * 86_400
    assert not unanswered(before)
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(elasticcb_\w+)` \|", page, re.MULTILINE)) == before.families


def test_workers_come_and_go_while_the_job_runs_and_nothing_is_trained_twice_or_left_behind(
    data, start_job, capsys, monkeypatch
):
    all_three = "\n    def callbacks():\n        return [Pace(), Gate(), Farewell()]\n"
    text = LINEAR_MODEL + PACE.format(seconds=0.01) + CALLBACKS + GATE.format(version=200) + all_three
    write_model_file(data, text, "linear")
    temporary = data / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    more = {"updates": "async", "max_staleness": 1, "max_worker_restarts": 0, "output": data / "model"}
    job = start_job("train", *flags(data, num_epochs=4, evaluation_steps=40, **more))
    job.wait_for_line(r"Evaluation at version")
    job.kill("worker", 1, signal.SIGTERM)
    job.wait_for_line(r"worker 1 .* leaves: it was asked to end")
    job.wait_for_line(r"workers 2/2")
    assert elasticcb_main(["scale", str(data / "job"), "--workers=3"]) == 0
    assert "now has 3 workers (was 2)" in capsys.readouterr().out
    job.wait_for_line(r"workers 3/3")
    assert elasticcb_main(["scale", str(data / "job"), "--workers=2"]) == 0
    open_gate(data)
    job.wait_for_line(r"workers 2/2")
    assert "now has 2 workers (was 3)" in capsys.readouterr().out
    assert elasticcb_main(["status", str(data / "job"), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["phase"], state["workers"]["planned"]) in {("training", 2), ("evaluating", 2)}
    assert state["records_trained"] > 0
    assert len([each for each in state["processes"] if each["cpu_seconds"] and each["resident_bytes"]]) >= 2
    assert elasticcb_main(["scale", str(data / "job"), "--workers=1000"]) == 2
    assert "1000 workers is invalid" in capsys.readouterr().err
    assert job.finish() == 0, job.output

    assert records_trained(job.output) == [RECORDS] * 4
    assert number(job.output, "duplicate records (at most)") == 0
    assert number(job.output, "workers lost") == 1
    assert {int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)} == {TESTED}
    assert len((data / "job" / "train_end").read_text().split()) == 1
    job.assert_no_orphans()
    assert list(temporary.iterdir()) == []
    assert elasticcb_main(["scale", str(data / "job"), "--workers=2"]) == 2
    assert "is not the folder of a running job" in capsys.readouterr().err
    assert elasticcb_main(["status", str(data / "job")]) == 0
    assert capsys.readouterr().out.startswith("linear (train): done\n  epoch 4/4, 100% (4,800/4,800 records)")


def test_a_parameter_server_that_keeps_no_files_fails_the_job(data, start_job):
    steps = {"num_epochs": 50, "evaluation_steps": 250, "checkpoint_steps": 50, "checkpoint_interval": 0}
    job = start_job("train", *flags(data, num_ps=2, checkpoint_dir=data / "ckpt", **steps))
    job.wait_for_line(r"Evaluation at version")
    job.kill("ps", 1)
    assert job.finish() == 1
    assert "parameter server 1" in job.output
    assert "killed by SIGKILL" in job.output
    assert "--checkpoint_dir_for_init" in job.output
    assert "Traceback" not in job.output
    job.assert_no_orphans()


def test_a_job_in_one_process_runs_and_ends_at_ctrl_c(data, start_job):
    more = {"cluster": "inprocess", "num_workers": 1, "num_ps": 2, "checkpoint_dir": data / "ckpt"}
    job = start_job("train", *flags(data, num_epochs=50, evaluation_steps=40, **more))
    job.wait_for_line(r"Evaluation at version")
    job.interrupt()
    assert job.finish() == 130, job.output
    assert "Traceback" not in job.output
    assert list((data / "ckpt").glob("version-*/manifest.json"))
