"""The callbacks that Keras ships, unmodified, in jobs: each does what it is for."""

import csv
import json

import keras
import numpy as np
import pytest

from jobs import job_settings, run_job, write_model_file

MODEL_FILE = """
    import keras

    FOLDER = {folder!r}

    def custom_model():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), loss="mse", metrics=["mae"])
        return model

    def callbacks():
        return [{callbacks}]
"""


@pytest.fixture
def train(tmp_path):
    """Trains with callbacks, given as the text of a list's items; answers the summary and the display."""
    generator = np.random.default_rng(0)
    for name, count in (("train", 320), ("test", 64)):
        x = generator.normal(size=(count, 4)).astype("float32")
        y = np.sin(x.sum(1, keepdims=True)).astype("float32")
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)

    def start(callbacks, epochs=4, validation=True, **parts):
        text = MODEL_FILE.format(folder=str(tmp_path), callbacks=callbacks)
        path = write_model_file(tmp_path, text, "stock")
        settings = job_settings(
            path,
            tmp_path / "job",
            training=str(tmp_path / "train.npz"),
            validation=str(tmp_path / "test.npz") if validation else "",
            minibatch_size=16,
            num_minibatches_per_task=5,
            num_epochs=epochs,
            **parts,
        )
        return run_job(settings)

    return start


def rows_of(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_csv_logger_writes_a_row_for_each_epoch(train, tmp_path):
    _, display = train("keras.callbacks.CSVLogger(FOLDER + '/log.csv')")
    rows = rows_of(tmp_path / "log.csv")
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert set(rows[0]) == {"epoch", "loss", "mae", "val_loss", "val_mae"}
    losses = [float(row["val_loss"]) for row in rows]
    assert losses[-1] < losses[0]
    assert f"loss {losses[-1]:.4f}" in [m for m in display.messages if m.startswith("Evaluation")][-1]


def test_model_checkpoint_keeps_the_best_model_and_it_loads(train, tmp_path):
    train(
        "keras.callbacks.ModelCheckpoint(FOLDER + '/best.keras', monitor='val_loss', save_best_only=True), "
        "keras.callbacks.CSVLogger(FOLDER + '/log.csv')"
    )
    best = min(float(row["val_loss"]) for row in rows_of(tmp_path / "log.csv"))
    model = keras.saving.load_model(tmp_path / "best.keras")
    test = np.load(tmp_path / "test.npz")
    loss, _ = model.evaluate(test["x"], test["y"], verbose=0)
    assert loss == pytest.approx(best, rel=1e-5)


def test_early_stopping_ends_training_when_the_metric_stalls(train):
    summary, _ = train("keras.callbacks.EarlyStopping(monitor='val_loss', min_delta=10.0, patience=1)", epochs=20)
    assert summary.version == 2 * 20  # the first epoch sets the mark, the second does not reach it
    assert "EarlyStopping" in summary.stopped_early


def test_reduce_lr_on_plateau_lowers_the_rate_that_the_servers_use(train, tmp_path):
    train(
        "keras.callbacks.ReduceLROnPlateau(monitor='val_loss', factor=0.1, patience=1, min_delta=10.0), "
        "keras.callbacks.CSVLogger(FOLDER + '/log.csv'), "
        "keras.callbacks.ModelCheckpoint(FOLDER + '/epoch-{epoch}.weights.h5', save_weights_only=True)",
        epochs=5,
    )
    rates = [float(row["learning_rate"]) for row in rows_of(tmp_path / "log.csv")]
    assert rates[0] == pytest.approx(0.05)
    assert rates[-1] < 0.001
    moved = [_distance(tmp_path, epoch, epoch + 1) for epoch in range(1, 5)]
    assert moved[-1] < moved[0] / 20


def _distance(folder, first, second):
    def weights(epoch):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.load_weights(folder / f"epoch-{epoch}.weights.h5")
        return np.concatenate([w.reshape(-1) for w in model.get_weights()])

    return np.linalg.norm(weights(first) - weights(second))


def test_learning_rate_scheduler_by_epoch_sets_the_rate_of_the_next_epoch(train, tmp_path):
    train(
        "keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else 0.0), "
        "keras.callbacks.ModelCheckpoint(FOLDER + '/epoch-{epoch}.weights.h5', save_weights_only=True)"
    )
    assert _distance(tmp_path, 1, 2) > 0.01
    assert _distance(tmp_path, 3, 4) == 0.0


def test_lambda_callback_sees_epochs_and_batches(train, tmp_path):
    train(
        "keras.callbacks.LambdaCallback("
        "on_epoch_end=lambda epoch, logs: open(FOLDER + '/epochs', 'a').write(f'{epoch} '), "
        "on_train_batch_end=lambda batch, logs: open(FOLDER + '/batches', 'a').write(f'{batch} '))"
    )
    assert (tmp_path / "epochs").read_text().split() == ["0", "1", "2", "3"]
    assert len((tmp_path / "batches").read_text().split()) == 4 * 20


def test_tensorboard_shows_losses_by_epoch(train, tmp_path):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    train("keras.callbacks.TensorBoard(FOLDER + '/board')")
    board = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "board")).Reload()
    for run in ("train", "validation"):
        steps = [event.step for event in board.Tensors(run, "epoch_loss")]
        assert steps == [0, 1, 2, 3]


def test_history_of_the_master_holds_every_epoch(train, tmp_path):
    train(
        "h := keras.callbacks.History(), keras.callbacks.LambdaCallback("
        "on_epoch_end=lambda epoch, logs: open(FOLDER + '/history', 'w').write(__import__('json').dumps(h.history)))"
    )
    history = json.loads((tmp_path / "history").read_text())
    assert {name: len(values) for name, values in history.items()} == {
        "loss": 4, "mae": 4, "val_loss": 4, "val_mae": 4
    }  # fmt: skip
