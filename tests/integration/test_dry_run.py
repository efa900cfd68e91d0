"""`elasticcb train --dry_run`: one batch, and nothing is kept."""

import pytest

from elasticcb.cli.main import main
from elasticcb.errors import ExitCode
from jobs import write_model_file

MODEL = """
    import keras
    import tensorflow as tf

    import elasticcb

    def custom_model():
        user = keras.Input((), dtype="string", name="user")
        x = elasticcb.layers.Embedding(8, name="users")(user)
        model = keras.Model({"user": user}, keras.layers.Dense(1, activation="sigmoid", name="click")(x))
        model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
        return model

    def feed(dataset, mode, metadata):
        def parse(line):
            user, click = tf.io.decode_csv(line, ["", 0.0])
            return {"user": user}, click[None]

        return dataset.map(parse)

    class Writes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            open("batch", "w").close()

        def on_epoch_end(self, epoch, logs=None):
            open("epoch", "w").close()

    def callbacks():
        return [Writes(), keras.callbacks.CSVLogger("log.csv")]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model_file(tmp_path, MODEL, "clicks")
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("".join(f"user_{i},{i % 2}\n" for i in range(300)))
    return sorted(path.name for path in tmp_path.iterdir())


FLAGS = ["--model_zoo=.", "--model_def=clicks.custom_model", "--training_data=train.csv", "--minibatch_size=16"]


def test_dry_run_trains_a_batch_shows_what_the_job_would_do_and_keeps_nothing(files, tmp_path, capsys):
    more = ["--validation_data=test.csv", "--output=exported", "--checkpoint_dir=checkpoints", "--checkpoint_steps=50"]
    assert main(["train", *FLAGS, *more, "--num_workers=4", "--dry_run"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    for part in (
        "    features user  string [16]",
        "    labels         float32 [16, 1]",
        "users/embeddings  float32, a table on the servers: rows made on first use, of 8 numbers each",
        "click/kernel      float32 [8, 1]",
        "val_loss ",
        "Writes              master: on_epoch_end; worker: on_train_batch_end",
        "CSVLogger           master: on_train_begin, on_train_end, on_epoch_end",
        "jobs/train-clicks-TIME: logs, status, and recovery files every 10 s",
        "checkpoints   ",
        "every 50 versions and at the end; the newest 3 are kept",
        "exported, with the inputs user string",
        "CSVLogger     log.csv",
    ):
        assert part in shown
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == files


def test_dry_run_fails_as_the_job_would(files, tmp_path, capsys):
    (tmp_path / "train.csv").write_text("user,click\nuser_1,0\n")
    assert main(["train", *FLAGS, "--dry_run"]) == ExitCode.JOB_FAILED
    assert "set the reader parameter header=true" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == files
