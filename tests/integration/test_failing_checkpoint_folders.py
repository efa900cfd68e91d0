"""Checkpoint folders on a disk that fails: jobs go on without checkpoints, and say so. Remote ones: next door."""

from pathlib import Path

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb import CheckpointOptions
from elasticcb.checkpoint.manifest import verify
from elasticcb.checkpoint.versions import find_versions
from elasticcb.errors import LastCheckpointError
from elasticcb.roles.master import run_master
from jobs import LINEAR_MODEL, RecordingDisplay, job_settings, linear_data, write_model_file

CONTINUES = "The job continues without this checkpoint"


@pytest.fixture
def settings(tmp_path):
    linear_data(tmp_path, train=320, test=32)
    return job_settings(
        write_model_file(tmp_path, LINEAR_MODEL, "linear"),
        tmp_path / "job",
        training=str(tmp_path / "train.npz"),
        validation=str(tmp_path / "test.npz"),
        minibatch_size=16,
        num_epochs=5,
        directory=str(tmp_path / "checkpoints"),
        steps=5,
        num_ps=2,
    )


class Display(RecordingDisplay):
    """Does something when the job says something for the first time; keeps the summary."""

    def __init__(self, **actions):
        super().__init__()
        self.actions, self.summary = {words.replace("_", " "): action for words, action in actions.items()}, None

    def message(self, text):
        super().message(text)
        for words in [words for words in self.actions if words in text]:
            self.actions.pop(words)()

    def finish(self, summary):
        self.summary = summary


def replaced(settings):
    """Functions that put a file in the place of the checkpoint folder, and remove it."""
    folder = Path(settings.checkpoint.directory)

    def fail():
        folder.rename(folder.with_name("before"))
        folder.write_text("no folder")

    return folder, fail, folder.unlink


def test_job_goes_on_while_the_folder_is_away(settings):
    folder, fail, mend = replaced(settings)
    display = Display(Evaluation_at_version=fail, The_job_continues=mend)
    summary = run_master(settings, display)
    assert summary.records_per_epoch == (320,) * 5
    assert summary.checkpoints_failed >= 1
    (line,) = [line for line in display.messages if CONTINUES in line]
    assert str(folder) in line
    assert "Checkpoints can be written again." in display.messages
    assert verify(find_versions(folder)[-1])["version"] == summary.version
    assert summary.checkpoint_path == str(find_versions(folder)[-1])


def test_job_whose_last_checkpoint_is_missing_is_done_but_for_it_and_resume_writes_it(settings):
    folder, fail, mend = replaced(settings)
    display = Display(Evaluation_at_version=fail)
    with pytest.raises(LastCheckpointError, match=r"finished without its last checkpoint: .*checkpoints.*resume"):
        run_master(settings, display)
    assert display.summary.records_per_epoch == (320,) * 5
    assert display.summary.checkpoints_failed >= 2
    assert len([line for line in display.messages if CONTINUES in line]) == 1
    mend()
    summary = run_master(settings, RecordingDisplay(), resumed=True)
    assert verify(find_versions(folder)[-1])["version"] == summary.version == display.summary.version


def test_fit_gives_back_what_it_trained_without_its_last_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.write_text("no folder")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before = model.get_weights()[0]
    with elasticcb.Cluster(
        kind="inprocess", checkpoint_dir=str(folder), checkpoint=CheckpointOptions(steps=2)
    ) as cluster:
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="last checkpoint is missing: .*checkpoints") as warned:
                history = cluster.fit(model, x, x.sum(1), epochs=2, verbose=0)
            assert warned[0].filename == __file__
            assert len(history.history["loss"]) == 2
    assert np.abs(model.get_weights()[0] - before).max() > 0.01
