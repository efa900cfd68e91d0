"""What ends by SIGTERM leaves nothing in the temporary folder."""

import os
import signal
import subprocess
import sys

import pytest

from jobs import LINEAR_MODEL, linear_data, train_flags, write_model_file

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


def ended_by_sigterm(command, line, temporary):
    """The exit code of a process, which gets SIGTERM when it has written `line`."""
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-u", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=temporary.parent,
    ) as process:
        try:
            assert any(line in each for each in process.stdout)
            assert list(temporary.iterdir()) or "program.py" not in command
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            return process.wait(60)
        finally:
            process.kill()


def test_program_with_a_cluster_leaves_no_temporary_file(tmp_path, temporary):
    (tmp_path / "program.py").write_text(PROGRAM)
    assert ended_by_sigterm(["program.py"], "Epoch 3/", temporary) == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []


@pytest.mark.deep
def test_job_of_the_command_line_leaves_no_temporary_file(tmp_path, temporary):
    linear_data(tmp_path, train=2_000, test=100)
    write_model_file(tmp_path, LINEAR_MODEL, "linear")
    command = ["-m", "elasticcb", "train", *train_flags(tmp_path, "linear", num_epochs=1_000)]
    assert ended_by_sigterm(command, "Evaluation at version", temporary) == 130
    assert list(temporary.iterdir()) == []


def test_job_that_is_done_leaves_no_temporary_file(tmp_path, temporary):
    """Also of a worker that had no task."""
    linear_data(tmp_path, train=10, test=10)
    write_model_file(tmp_path, LINEAR_MODEL, "linear")
    flags = train_flags(tmp_path, "linear", num_workers=2, output=tmp_path / "exported")
    subprocess.run(
        [sys.executable, "-m", "elasticcb", "train", *flags],
        check=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        cwd=tmp_path,
    )
    assert list(temporary.iterdir()) == []
