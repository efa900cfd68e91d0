"""Data files that are changed while a job uses them."""

import pytest

from elasticcb.errors import JobFailedError
from elasticcb.roles.master import run_master
from jobs import LINEAR_MODEL, RecordingDisplay, job_settings, linear_data, write_model_file


class Changes(RecordingDisplay):
    """Writes other training data when the first evaluation is done."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def message(self, text):
        super().message(text)
        if "Evaluation at version" in text:
            linear_data(self._folder, train=2_000)


def test_data_file_that_was_changed_ends_the_job_at_once_and_is_told_once(tmp_path):
    linear_data(tmp_path, train=1_000, test=32)
    settings = job_settings(
        write_model_file(tmp_path, LINEAR_MODEL, "linear"),
        tmp_path / "job",
        training=str(tmp_path / "train.npz"),
        validation=str(tmp_path / "test.npz"),
        minibatch_size=10,
        num_epochs=1_000,
    )
    display = Changes(tmp_path)
    with pytest.raises(JobFailedError) as raised:
        run_master(settings, display)
    story = str(raised.value)
    assert story.count("train.npz was changed while the job used it") == 1
    assert "the worker reported that retrying can't help" in story
    assert "times" not in story
