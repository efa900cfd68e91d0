"""The callbacks that Keras ships, unmodified, in jobs: each does what it is for."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from stock_callbacks import (
    BATCHES,
    assert_same,
    distance,
    final_weights,
    rows_of,
    saved_weights,
    train,
    write_data,
)

from elasticcb.errors import CallbackError
from elasticcb.settings import Command
from jobs import job_settings, run_job

# ---------------------------------------------------------------- BackupAndRestore


BACKUP = "keras.callbacks.BackupAndRestore(FOLDER + '/backup'), keras.callbacks.CSVLogger(FOLDER + '/log.csv'), Final()"
MOMENTUM = "keras.optimizers.SGD(0.05, momentum=0.9)"


def test_backup_and_restore_every_so_many_batches_restores_the_epoch_it_was_in(tmp_path):
    backup = BACKUP.replace("'/backup'", "'/backup', save_freq=8")
    with pytest.raises(CallbackError, match="the power is out"):
        train(tmp_path, f"{backup}, Fails()", epochs=3)
    metadata = json.loads((tmp_path / "backup" / "training_metadata.json").read_text())
    assert (metadata["epoch"], metadata["batch"]) == (0, 15)
    train(tmp_path, backup, epochs=3)
    assert [row["epoch"] for row in rows_of(tmp_path / "log.csv")] == ["0", "1", "2"]


# ---------------------------------------------------------------- EarlyStopping


def test_early_stopping_exports_and_checkpoints_the_weights_of_the_best_epoch(tmp_path):
    _, display = train(
        tmp_path,
        # From the third epoch on the model is made worse.
        "keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else -0.05), "
        "keras.callbacks.EarlyStopping(monitor='val_loss', patience=2, restore_best_weights=True), "
        "keras.callbacks.ModelCheckpoint(FOLDER + '/epoch-{epoch}.weights.h5', save_weights_only=True), Final()",
        epochs=9,
        output=str(tmp_path / "model"),
        directory=str(tmp_path / "checkpoints"),
        num_ps=2,
    )
    assert sorted(path.name for path in tmp_path.glob("epoch-*")) == [f"epoch-{n}.weights.h5" for n in (1, 2, 3, 4)]
    best = saved_weights(tmp_path / "epoch-2.weights.h5")
    assert distance(best, saved_weights(tmp_path / "epoch-4.weights.h5")) > 0.01
    assert_same(final_weights(tmp_path), best, rtol=0, atol=0)

    losses = [float(m.partition("loss ")[2].split(",")[0]) for m in display.messages if m.startswith("Evaluation")]
    data = np.load(tmp_path / "test.npz")
    served = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    (predictions,) = served(tf.constant(data["x"])).values()
    assert np.mean((predictions - data["y"]) ** 2) == pytest.approx(min(losses), abs=1e-4)

    settings = job_settings(
        tmp_path / "stock_0.py",
        tmp_path / "evaluate",
        command=Command.EVALUATE,
        validation=str(tmp_path / "test.npz"),
        directory_for_init=str(tmp_path / "checkpoints"),
    )
    summary, _ = run_job(settings)
    assert summary.metrics["loss"] == pytest.approx(min(losses), abs=1e-4)


# ---------------------------------------------------------------- ModelCheckpoint


def test_model_checkpoint_every_so_many_steps_counts_the_batches_of_all_workers(tmp_path):
    train(
        tmp_path,
        "keras.callbacks.ModelCheckpoint(FOLDER + '/epoch-{epoch}-batch-{batch}-{loss:.3f}.keras', save_freq=15)",
        epochs=3,
        num_workers=2,
    )
    saved = {path.name.rpartition("-")[0]: path for path in tmp_path.glob("epoch-*.keras")}
    assert sorted(saved) == ["epoch-1-batch-15", "epoch-2-batch-10", "epoch-3-batch-20", "epoch-3-batch-5"]
    versions = []
    for name, batches in zip(sorted(saved), (15, 30, 60, 45), strict=True):
        model = keras.saving.load_model(saved[name])
        versions.append(int(model.optimizer.iterations.numpy()))
        assert batches <= versions[-1] <= BATCHES * (1 + (batches - 1) // BATCHES)
    assert versions[2] == 60
    assert distance(saved_weights_of(saved["epoch-1-batch-15"]), saved_weights_of(saved["epoch-3-batch-20"])) > 0.01


def saved_weights_of(path):
    return keras.saving.load_model(path).get_weights()


# ---------------------------------------------------------------- SwapEMAWeights


def test_swap_ema_weights_leaves_the_evaluation_of_a_trained_model_alone(tmp_path):
    checkpoints = str(tmp_path / "checkpoints")
    summary, _ = train(
        tmp_path,
        "keras.callbacks.SwapEMAWeights()",
        epochs=3,
        optimizer="keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)",
        directory=checkpoints,
    )
    settings = job_settings(
        tmp_path / "stock_0.py",
        tmp_path / "evaluate",
        command=Command.EVALUATE,
        validation=str(tmp_path / "test.npz"),
        directory_for_init=checkpoints,
    )
    assert run_job(settings)[0].metrics["loss"] == pytest.approx(summary.metrics["loss"], rel=1e-5)


# ---------------------------------------------------------------- TerminateOnNaN


def spoil(folder):
    write_data(folder)
    with np.load(folder / "train.npz") as file:
        x, y = file["x"], file["y"].copy()
    y[200] = np.inf
    np.savez(folder / "train.npz", x=x, y=y)


def test_terminate_on_nan_ends_the_job_in_order(tmp_path):
    spoil(tmp_path)
    summary, _ = train(
        tmp_path,
        "keras.callbacks.TerminateOnNaN(), keras.callbacks.CSVLogger(FOLDER + '/log.csv'), Final()",
        output=str(tmp_path / "model"),
    )
    assert "TerminateOnNaN" in summary.stopped_early
    assert summary.batches_skipped == 1
    assert np.isfinite(summary.metrics["loss"])
    (row,) = rows_of(tmp_path / "log.csv")
    assert np.isfinite(float(row["val_loss"]))
    assert all(np.isfinite(weight).all() for weight in final_weights(tmp_path))
    assert (tmp_path / "model" / "saved_model.pb").exists()
