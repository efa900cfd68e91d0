"""Real jobs on a machine that runs out of something: each ends with advice, or goes on and says so."""

import re
import resource
import shutil
import subprocess
import sys

import pytest
from waiting import wait_until

from jobs import LINEAR_MODEL, linear_data, records_trained, train_flags, write_model_file

RECORDS = 800


@pytest.fixture
def data(tmp_path):
    linear_data(tmp_path, train=RECORDS, test=100)
    write_model_file(tmp_path, LINEAR_MODEL, "linear")
    return tmp_path


FEW = 20  # open files


def train(data, most_files):
    """Runs a job whose limit of open files is `FEW`, and may be raised to `most_files`."""
    limited = ["sh", "-c", 'ulimit -S -n "$1" && ulimit -H -n "$2" && shift 2 && exec "$@"', "sh"]
    job = [sys.executable, "-m", "elasticcb", "train", *train_flags(data, "linear")]
    command = [*limited, str(FEW), str(most_files), *job]
    return subprocess.run(command, cwd=data, capture_output=True, text=True, check=False)


def test_job_without_room_for_open_files_says_how_to_allow_more(data):
    job = train(data, FEW)
    assert job.returncode == 1
    assert re.search("^Error: .*oo many open files", job.stderr, re.MULTILINE), job.stderr


@pytest.mark.deep
def test_low_limit_of_open_files_that_can_be_raised_is_no_matter(data):
    job = train(data, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert job.returncode == 0, job.stderr


def test_recovery_files_that_can_not_be_written_are_told_of_and_training_goes_on(data, start_job):
    job = start_job("train", *train_flags(data, "linear", num_epochs=10, checkpoint_interval=0.1))
    job.wait_for_line("training: epoch 1/10")
    folder = data / "job" / "recovery"
    wait_until((folder / "manifest.json").exists)
    shutil.rmtree(folder)
    folder.touch()  # as hard to write into as a full disk, also for root
    warning = job.wait_for_line("recovery.* can't be (made|written)")
    assert "Training continues" in warning
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 10
    assert job.output.count("Training continues") == 1
