"""Jobs of the command line on each backend: processes that are killed, checkpoints that other backends open."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_backends import BACKENDS, require
from waiting import wait_until

ZOO = Path(__file__).parent / "zoo"
RECORDS = 2000

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600), pytest.mark.parametrize("backend", BACKENDS)]


@pytest.fixture
def data(backend, tmp_path):
    require(backend)
    numbers = np.random.default_rng(0).normal(size=(RECORDS, 4))
    lines = np.concatenate([numbers, numbers.sum(1, keepdims=True) > 0], 1)
    np.savetxt(tmp_path / "data.csv", lines, "%.5f", ",")
    return tmp_path / "data.csv"


def begin(backend, command, folder, **flags):
    given = {"model_zoo": ZOO, "model_def": "line.custom_model", "minibatch_size": 20, "job_dir": folder, **flags}
    words = [f"--{name}={value}" for name, value in given.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "elasticcb", command, *words],
        env=os.environ | {"KERAS_BACKEND": backend},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def metrics(backend, command, folder, **flags):
    """What a job's last evaluation comes to."""
    process = begin(backend, command, folder, **flags)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return {name: float(value) for name, value in re.findall(r"^  (loss|accuracy) +([\d.]+)$", output, re.MULTILINE)}


def pids(folder):
    """Of the processes of a job, by name, as its master knows them."""
    with contextlib.suppress(OSError):
        log = (folder / "logs" / "master.log").read_text()
        return {
            f"{role} {index}": int(pid)
            for role, index, pid in re.findall(r"(worker|server) (\d) \(id \d+, pid (\d+)", log)
        }
    return {}


def test_checkpoints_and_exports_of_a_backend_are_used_by_another(backend, data, tmp_path):
    import tensorflow as tf

    folder = tmp_path / "checkpoints"
    found = metrics(
        backend,
        "train",
        tmp_path / "job",
        training_data=data,
        validation_data=data,
        num_ps=2,
        num_epochs=3,
        checkpoint_dir=folder,
        output=tmp_path / "exported",
    )
    assert found["accuracy"] > 0.9
    checkpoint = {"validation_data": data, "checkpoint_dir_for_init": folder}
    for other in (backend, "tensorflow"):
        again = metrics(other, "evaluate", tmp_path / f"evaluated on {other}", **checkpoint)
        assert again == pytest.approx(found, abs=2e-4)
    lines = np.loadtxt(data, delimiter=",", dtype="float32")
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    scores = exported.signatures["serving_default"](numbers=tf.constant(lines[:, :4]))["score"].numpy()
    assert np.mean((scores[:, 0] > 0) == lines[:, 4]) == pytest.approx(found["accuracy"], abs=1e-3)
    # Training goes on, on the other one and back.
    more = {"training_data": data, **checkpoint, "num_epochs": 1}
    next_folder = tmp_path / "next"
    metrics("tensorflow", "train", tmp_path / "job 2", checkpoint_dir=next_folder, **more)
    found = metrics(backend, "train", tmp_path / "job 3", **{**more, "checkpoint_dir_for_init": next_folder})
    assert found["accuracy"] > 0.93


def test_a_worker_and_a_server_that_are_killed_are_replaced(backend, data, tmp_path):
    folder = tmp_path / "job"
    process = begin(
        backend,
        "train",
        folder,
        training_data=data,
        validation_data=data,
        num_workers=2,
        num_ps=2,
        num_epochs=60,
        checkpoint_interval=1,
    )
    for name in ("worker 0", "server 1"):
        wait_until(lambda name=name: re.search(r"Epoch \d+ is done", _log(folder)) and name in pids(folder))
        killed = pids(folder)[name]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda name=name, killed=killed: pids(folder)[name] != killed)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert re.search(r"workers lost +1 \(1 replaced\)", output)
    assert re.search(r"parameter servers lost +1 \(1 replaced", output)
    assert float(re.findall(r"^  accuracy +([\d.]+)$", output, re.MULTILINE)[0]) > 0.93


def _log(folder):
    with contextlib.suppress(OSError):
        return (folder / "logs" / "master.log").read_text()
    return ""
