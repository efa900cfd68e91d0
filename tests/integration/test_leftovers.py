"""What ends by SIGTERM leaves nothing in the temporary folder; what ends otherwise: test_processes.py."""

import os
import signal

import pytest

from jobs import LINEAR_MODEL, linear_data, train_flags, write_model_file
from warm import WarmProcess

pytestmark = pytest.mark.deep

PROGRAM = """
import keras
import numpy as np
import elasticcb

x = np.ones((2_000, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
if __name__ == "__main__":
    with elasticcb.Cluster() as cluster:
        cluster.fit(model, x, x[:, :1], epochs=10_000, verbose=2)
"""


@pytest.fixture
def temporary(tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


@pytest.fixture
def environment(temporary):
    return os.environ | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}


def ended_by_sigterm(process, line):
    """The exit code of a process, which gets SIGTERM when it has written `line`."""
    try:
        assert any(line in each for each in process.stdout)
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        return process.wait(60)
    finally:
        process.kill()


def test_program_with_a_cluster_leaves_no_temporary_file(tmp_path, temporary, environment):
    (tmp_path / "program.py").write_text(PROGRAM)
    program = WarmProcess([], tmp_path, environment, tmp_path / "program.py")
    assert any("Epoch 2/" in each for each in program.stdout)
    assert list(temporary.iterdir())
    assert ended_by_sigterm(program, "Epoch 3/") == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []


def test_job_of_the_command_line_leaves_no_temporary_file(tmp_path, temporary, environment):
    linear_data(tmp_path, train=2_000, test=100)
    write_model_file(tmp_path, LINEAR_MODEL, "linear")
    job = WarmProcess(["train", *train_flags(tmp_path, "linear", num_epochs=1_000)], tmp_path, environment)
    assert ended_by_sigterm(job, "Evaluation at version") == 130
    assert list(temporary.iterdir()) == []
