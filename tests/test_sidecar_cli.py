"""`elasticcb evaluate --follow`, beside a real training job and by its limits."""

from __future__ import annotations

import json

import numpy as np
import pytest

from elasticcb.checkpoint.versions import find_versions
from elasticcb.cli.main import main
from jobs import JobProcess, job_settings, run_job, write_model_file

MODEL_FILE = """
    import keras

    def custom_model():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return model

    class Versions(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            with open(self.params["job_directory"] + "/versions", "a") as file:
                file.write(f"{logs['version']}\\n")
            print("noted", logs["version"], flush=True)

    def callbacks():
        return [Versions()]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model file and data."""
    monkeypatch.chdir(tmp_path)
    write_model_file(tmp_path, MODEL_FILE, "followed")
    x = np.random.default_rng(0).normal(size=(240, 4)).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, y=x.sum(1, keepdims=True))
    return tmp_path


def follow_flags(*more):
    flags = ["--model_zoo=.", "--model_def=followed.custom_model", "--validation_data=data.npz", "--job_dir=job"]
    return ["evaluate", *flags, "--checkpoint_dir_for_init=checkpoints", "--follow", *more]


def results(job):
    file = job / "evaluations.jsonl"  # made with the first result
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_it_follows_a_training_job_in_processes_until_ctrl_c(place):
    evaluation = JobProcess(*follow_flags(), cwd=place)
    training = None
    try:
        evaluation.wait_for_line("Following .*checkpoints")  # which is not there yet
        data = ["--model_zoo=.", "--model_def=followed.custom_model", "--training_data=data.npz", "--minibatch_size=8"]
        checkpoints = ["--checkpoint_dir=checkpoints", "--checkpoint_steps=20", "--keep_checkpoint_max=0"]
        training = JobProcess("train", *data, *checkpoints, "--job_dir=training", cwd=place)
        assert training.finish() == 0, training.output
        evaluation.wait_for_line("noted 30")
        evaluation.interrupt()
        assert evaluation.finish() == 130, evaluation.output
        assert "Interrupted." in evaluation.output
        assert "Traceback" not in evaluation.output
        evaluation.assert_no_orphans()
    finally:
        for process in filter(None, (evaluation, training)):
            process.process.kill()
            process.process.wait()
    written = [int(folder.name.removeprefix("version-")) for folder in find_versions(place / "checkpoints")]
    seen = [int(version) for version in (place / "job" / "versions").read_text().split()]
    assert seen == written
    assert "Evaluation at version 30: " in evaluation.output
    # Ctrl-C comes when the last job is about to end, or has ended.
    assert [entry["version"] for entry in results(place / "job")] in (written, written[:-1])


def test_it_ends_well_at_its_limits_and_fails_at_a_checkpoint_of_another_model(place, capsys):
    settings = job_settings(
        place / "followed.py",
        place / "training",
        training=str(place / "data.npz"),
        minibatch_size=8,
        directory=str(place / "checkpoints"),
        steps=10,
        keep_max=0,
    )
    run_job(settings)
    trained = find_versions(place / "checkpoints")
    assert len(trained) == 3
    for name, limit, count in (("two", "--max_evaluations=2", 2), ("all", "--follow_timeout=0.3", 3)):
        capsys.readouterr()
        assert main(follow_flags("--cluster=inprocess", f"--job_dir={name}", limit)) == 0
        written = results(place / name)
        assert [entry["checkpoint"] for entry in written] == [str(folder) for folder in trained[:count]]
        assert [entry["version"] for entry in written] == [int(folder.name[-8:]) for folder in trained[:count]]
        assert all(entry["records"] == 240 for entry in written)
        losses = [entry["metrics"]["loss"] for entry in written]
        assert losses == sorted(losses, reverse=True)
        output = capsys.readouterr().out
        assert output.count("Evaluation at version") == len(written)
        assert f"Evaluated {count} checkpoints. Results: {place / name / 'evaluations.jsonl'}" in output
        assert ("No new checkpoint appeared for 0.3 s" in output) == (name == "all")

    write_model_file(place, MODEL_FILE.replace("Dense(1)", "Dense(2)"), "other")
    flags = [flag.replace("followed.", "other.") for flag in follow_flags("--cluster=inprocess")]
    assert main(flags) == 1
    assert "belongs to another model" in capsys.readouterr().err


def test_nothing_to_evaluate_in_time_is_no_error(place, capsys):
    assert main(follow_flags("--follow_timeout=0.1")) == 0
    assert "No new checkpoint appeared for 0.1 s. No checkpoint was evaluated." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--follow=false", "--max_evaluations=2"], "--max_evaluations=2 applies only to --follow"),
        (["--follow=false", "--follow_timeout=2"], "Add --follow, or remove --follow_timeout"),
        (["--follow_timeout=-1"], "--follow_timeout=-1 is invalid. Expected at least 0"),
        (["--checkpoint_dir_for_init=one"], "a single checkpoint. --follow needs the folder that contains it"),
        (["--checkpoint_dir_for_init=data.npz"], "data.npz, which is not a folder"),
    ],
)
def test_flags_that_make_no_sense_are_told_before_anything_starts(place, flags, expected, capsys):
    (place / "one").mkdir()
    (place / "one" / "manifest.json").write_text("{}")
    assert main(follow_flags(*flags)) == 2
    assert expected in capsys.readouterr().err
    assert not (place / "job").exists()
