"""The callbacks that Keras ships, unmodified, in jobs: each does what it is for."""

import csv
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import keras
import numpy as np
import pytest
import tensorflow as tf

from deep_cases import deep_but
from elasticcb.errors import CallbackError, JobFailedError
from elasticcb.settings import Command
from jobs import job_settings, run_job, write_model_file

MODEL_FILE = """
    import keras
    import numpy as np

    FOLDER = {folder!r}

    def custom_model():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile({optimizer}, loss="mse", metrics=["mae"])
        return model

    class Final(keras.callbacks.Callback):
        def on_train_end(self, logs=None):  # on the worker that exports the model
            np.savez(FOLDER + "/final.npz", *self.model.get_weights())

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise OSError("the power is out")

    def callbacks():
        return [{callbacks}]
"""
SGD = "keras.optimizers.SGD(0.05)"
BATCHES = 20  # of an epoch


@pytest.fixture
def train(tmp_path):
    """Trains with callbacks, given as the text of a list's items; answers the summary and the display."""
    generator = np.random.default_rng(0)
    for name, count in (("train", 320), ("test", 64)):
        x = generator.normal(size=(count, 4)).astype("float32")
        y = np.sin(x.sum(1, keepdims=True)).astype("float32")
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)

    def start(callbacks, epochs=4, validation=True, optimizer=SGD, **parts):
        text = MODEL_FILE.format(folder=str(tmp_path), callbacks=callbacks, optimizer=optimizer)
        # Each a module of its own: a process imports a model file once.
        path = write_model_file(tmp_path, text, f"stock_{len([*tmp_path.glob('stock_*.py')])}")
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


def final_weights(folder):
    with np.load(folder / "final.npz") as file:
        return [file[f"arr_{index}"] for index in range(len(file.files))]


def saved_weights(path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.load_weights(path)
    return model.get_weights()


def assert_same(weights, others, rtol=1e-5, atol=1e-6):
    for weight, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(weight, other, rtol=rtol, atol=atol)


def distance(weights, others):
    return max(np.abs(weight - other).max() for weight, other in zip(weights, others, strict=True))


def val_loss(model, folder):
    data = np.load(folder / "test.npz")
    return model.evaluate(data["x"], data["y"], verbose=0, return_dict=True)["loss"]


# ---------------------------------------------------------------- BackupAndRestore


BACKUP = "keras.callbacks.BackupAndRestore(FOLDER + '/backup'), keras.callbacks.CSVLogger(FOLDER + '/log.csv'), Final()"
MOMENTUM = "keras.optimizers.SGD(0.05, momentum=0.9)"


def test_backup_and_restore_goes_on_with_weights_momentum_and_epoch_after_a_failure(train, tmp_path):
    train(BACKUP, epochs=3, optimizer=MOMENTUM)
    whole = final_weights(tmp_path)
    assert not (tmp_path / "backup").exists()  # the job came to its end

    with pytest.raises(CallbackError, match="the power is out"):
        train(f"{BACKUP}, Fails()", epochs=3, optimizer=MOMENTUM)
    assert [row["epoch"] for row in rows_of(tmp_path / "log.csv")] == ["0"]
    assert (tmp_path / "backup").exists()

    summary, _ = train(BACKUP, epochs=3, optimizer=MOMENTUM)
    assert [row["epoch"] for row in rows_of(tmp_path / "log.csv")] == ["1", "2"]
    assert sum(summary.records_per_epoch) == 2 * 320
    assert_same(final_weights(tmp_path), whole)
    assert not (tmp_path / "backup").exists()


def test_backup_that_holds_the_last_epoch_leaves_nothing_to_train(train, tmp_path):
    backup = BACKUP.replace("'/backup'", "'/backup', delete_checkpoint=False")
    train(backup, epochs=2)
    trained = final_weights(tmp_path)
    summary, _ = train(backup, epochs=2)
    assert sum(summary.records_per_epoch) == 0
    assert_same(final_weights(tmp_path), trained)


def test_backup_and_restore_every_so_many_batches_restores_the_epoch_it_was_in(train, tmp_path):
    backup = BACKUP.replace("'/backup'", "'/backup', save_freq=8")
    with pytest.raises(CallbackError, match="the power is out"):
        train(f"{backup}, Fails()", epochs=3)
    metadata = json.loads((tmp_path / "backup" / "training_metadata.json").read_text())
    assert (metadata["epoch"], metadata["batch"]) == (0, 15)
    train(backup, epochs=3)
    assert [row["epoch"] for row in rows_of(tmp_path / "log.csv")] == ["0", "1", "2"]


# ---------------------------------------------------------------- CSVLogger, History, RemoteMonitor, LambdaCallback


@pytest.fixture
def monitor():
    """A server that keeps what is posted to it: its address, and path and content of each request."""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", posted
    server.shutdown()
    server.server_close()


def test_callbacks_that_keep_logs_see_every_epoch_and_every_batch(train, tmp_path, monitor):
    root, posted = monitor
    _, display = train(
        "keras.callbacks.CSVLogger(FOLDER + '/log.csv'), "
        f"keras.callbacks.RemoteMonitor({root!r}, path='/epochs', send_as_json=True), "
        "h := keras.callbacks.History(), keras.callbacks.LambdaCallback("
        "on_epoch_end=lambda epoch, logs: open(FOLDER + '/history', 'w').write(__import__('json').dumps(h.history))), "
        "keras.callbacks.LambdaCallback("
        "on_epoch_end=lambda epoch, logs: open(FOLDER + '/epochs', 'a').write(f'{epoch} '), "
        "on_train_batch_end=lambda batch, logs: open(FOLDER + '/batches', 'a').write(f'{batch} '))"
    )
    rows = rows_of(tmp_path / "log.csv")
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert set(rows[0]) == {"epoch", "loss", "mae", "val_loss", "val_mae"}
    losses = [float(row["val_loss"]) for row in rows]
    assert losses[-1] < losses[0]
    assert f"loss {losses[-1]:.4f}" in [m for m in display.messages if m.startswith("Evaluation")][-1]

    history = json.loads((tmp_path / "history").read_text())
    assert {name: len(values) for name, values in history.items()} == {
        "loss": 4, "mae": 4, "val_loss": 4, "val_mae": 4
    }  # fmt: skip

    assert [path for path, _ in posted] == ["/epochs"] * 4
    for (_, sent), row in zip(posted, rows, strict=True):
        assert sent == {name: pytest.approx(float(value)) for name, value in row.items()}

    assert (tmp_path / "epochs").read_text().split() == ["0", "1", "2", "3"]
    assert len((tmp_path / "batches").read_text().split()) == 4 * BATCHES


# ---------------------------------------------------------------- EarlyStopping


def test_early_stopping_ends_training_when_the_metric_stalls(train):
    summary, _ = train("keras.callbacks.EarlyStopping(monitor='val_loss', min_delta=10.0, patience=1)", epochs=20)
    assert summary.version == 2 * BATCHES  # the first epoch sets the mark, the second does not reach it
    assert "EarlyStopping" in summary.stopped_early


@pytest.mark.parametrize("servers", deep_but([1, 2], 2))
def test_early_stopping_exports_and_checkpoints_the_weights_of_the_best_epoch(train, tmp_path, servers):
    _, display = train(
        # From the third epoch on the model is made worse.
        "keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else -0.05), "
        "keras.callbacks.EarlyStopping(monitor='val_loss', patience=2, restore_best_weights=True), "
        "keras.callbacks.ModelCheckpoint(FOLDER + '/epoch-{epoch}.weights.h5', save_weights_only=True), Final()",
        epochs=9,
        output=str(tmp_path / "model"),
        directory=str(tmp_path / "checkpoints"),
        num_ps=servers,
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


# ---------------------------------------------------------------- learning rates


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
    saved = [saved_weights(tmp_path / f"epoch-{epoch}.weights.h5") for epoch in range(1, 6)]
    assert distance(saved[3], saved[4]) < distance(saved[0], saved[1]) / 20


def test_learning_rate_scheduler_sets_the_rate_of_the_next_epoch_and_weights_are_saved_at_each_end(train, tmp_path):
    train(
        "keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else 0.0), "
        "keras.callbacks.ModelCheckpoint(FOLDER + '/epoch-{epoch}.weights.h5', save_weights_only=True), Final()"
    )
    saved = [saved_weights(tmp_path / f"epoch-{epoch}.weights.h5") for epoch in range(1, 5)]
    assert distance(saved[0], saved[1]) > 0.01
    assert distance(saved[2], saved[3]) == 0.0
    assert_same(saved[3], final_weights(tmp_path), rtol=0, atol=0)


# ---------------------------------------------------------------- ModelCheckpoint


def test_model_checkpoint_keeps_the_best_model_and_it_goes_on_where_it_was(train, tmp_path):
    train(
        "keras.callbacks.ModelCheckpoint(FOLDER + '/best.keras', monitor='val_loss', save_best_only=True), "
        "keras.callbacks.CSVLogger(FOLDER + '/log.csv')",
        optimizer=MOMENTUM,
    )
    losses = [float(row["val_loss"]) for row in rows_of(tmp_path / "log.csv")]
    model = keras.saving.load_model(tmp_path / "best.keras")
    assert val_loss(model, tmp_path) == pytest.approx(min(losses), rel=1e-5)
    assert int(model.optimizer.iterations.numpy()) == BATCHES * (1 + losses.index(min(losses)))
    assert all(np.abs(momentum.numpy()).max() > 0 for momentum in model.optimizer.momentums)


@pytest.mark.parametrize("workers", deep_but([1, 2], 2))
def test_model_checkpoint_every_so_many_steps_counts_the_batches_of_all_workers(train, tmp_path, workers):
    train(
        "keras.callbacks.ModelCheckpoint(FOLDER + '/epoch-{epoch}-batch-{batch}-{loss:.3f}.keras', save_freq=15)",
        epochs=3,
        num_workers=workers,
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


# ---------------------------------------------------------------- ProgbarLogger


def test_progbar_logger_draws_a_bar_over_the_batches_of_all_workers(train, tmp_path, capsys):
    train("keras.callbacks.ProgbarLogger(), keras.callbacks.CSVLogger(FOLDER + '/log.csv')", epochs=2, num_workers=2)
    shown = re.sub(r"\x1b\[\d+m|\x08", "", capsys.readouterr().out)
    assert re.findall(r"Epoch \d/\d", shown) == ["Epoch 1/2", "Epoch 2/2"]
    steps = [int(step) for step in re.findall(r"(\d+)/20 ", shown)]
    assert steps.count(20) >= 2
    assert set(steps) <= set(range(1, 21))
    for row in rows_of(tmp_path / "log.csv"):
        assert f"val_loss: {float(row['val_loss']):.4f}" in shown


def test_progbar_logger_follows_evaluation_and_prediction(train, tmp_path, capsys):
    train("keras.callbacks.ProgbarLogger()", epochs=1, directory=str(tmp_path / "checkpoints"))
    data = {Command.EVALUATE: "validation", Command.PREDICT: "prediction"}
    np.savez(tmp_path / "features.npz", x=np.load(tmp_path / "test.npz")["x"])
    for command, mode in data.items():
        capsys.readouterr()
        settings = job_settings(
            tmp_path / "stock_0.py",
            tmp_path / "more",
            command=command,
            directory_for_init=str(tmp_path / "checkpoints"),
            minibatch_size=16,
            output=str(tmp_path / "predictions.csv") if command is Command.PREDICT else "",
            output_format="csv",
            **{mode: str(tmp_path / ("test.npz" if mode == "validation" else "features.npz"))},
        )
        summary, _ = run_job(settings)
        shown = re.sub(r"\x1b\[\d+m|\x08", "", capsys.readouterr().out)
        assert "4/4 " in shown
        if command is Command.EVALUATE:
            assert f"loss: {summary.metrics['loss']:.4f}" in shown


# ---------------------------------------------------------------- SwapEMAWeights


AVERAGED = "keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)"


def swap_ema(train, tmp_path, callback, **parts):
    """Trains for three epochs; answers logs, the model saved after each epoch, the final weights, and the summary."""
    summary, _ = train(
        f"{callback}keras.callbacks.ModelCheckpoint(FOLDER + '/epoch-{{epoch}}.keras'), "
        "keras.callbacks.CSVLogger(FOLDER + '/log.csv'), Final()",
        epochs=3,
        optimizer=AVERAGED,
        **parts,
    )
    models = [keras.saving.load_model(tmp_path / f"epoch-{epoch}.keras") for epoch in (1, 2, 3)]
    return rows_of(tmp_path / "log.csv"), models, final_weights(tmp_path), summary


def averages(model):
    return [variable.numpy() for variable in model.optimizer._model_variables_moving_average]


def test_swap_ema_weights_evaluates_the_averages_and_trains_the_weights(train, tmp_path):
    _, plain, plain_final, _ = swap_ema(train, tmp_path, "")

    checkpoints = str(tmp_path / "checkpoints")
    rows, models, final, summary = swap_ema(
        train, tmp_path, "keras.callbacks.SwapEMAWeights(), ", directory=checkpoints
    )
    for row, model, without in zip(rows[:-1], models, plain, strict=False):
        assert_same(model.get_weights(), without.get_weights())  # training and checkpoints have the raw weights
        raw_loss = val_loss(model, tmp_path)
        model.set_weights(averages(model))
        assert float(row["val_loss"]) == pytest.approx(val_loss(model, tmp_path), rel=1e-4)
        assert abs(float(row["val_loss"]) - raw_loss) > 1e-3
    assert_same(final, plain_final)

    # It leaves alone the evaluation of a trained model.
    settings = job_settings(
        tmp_path / "stock_1.py",
        tmp_path / "evaluate",
        command=Command.EVALUATE,
        validation=str(tmp_path / "test.npz"),
        directory_for_init=checkpoints,
    )
    assert run_job(settings)[0].metrics["loss"] == pytest.approx(summary.metrics["loss"], rel=1e-5)

    # By epoch, it gives the averages to the callbacks after it.
    _, models, final, _ = swap_ema(train, tmp_path, "keras.callbacks.SwapEMAWeights(swap_on_epoch=True), ")
    for model, without in zip(models[:-1], plain, strict=False):
        assert_same(model.get_weights(), averages(without), rtol=1e-4)
        assert distance(model.get_weights(), without.get_weights()) > 1e-3
    assert_same(models[-1].get_weights(), plain_final)
    assert_same(final, plain_final)  # the optimizer ends with the averages


# ---------------------------------------------------------------- TensorBoard


@pytest.fixture
def board(tmp_path):
    """Reads what TensorBoard wrote: steps by run and tag."""

    def read(run, tag):
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

        events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "board")).Reload().Tensors(run, tag)
        return {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in events}

    return read


def test_tensorboard_shows_losses_by_epoch(train, tmp_path, board):
    train("keras.callbacks.TensorBoard(FOLDER + '/board'), keras.callbacks.CSVLogger(FOLDER + '/log.csv')")
    rows = rows_of(tmp_path / "log.csv")
    for run, name in (("train", "loss"), ("validation", "val_loss")):
        values = board(run, "epoch_loss")
        assert values == {epoch: pytest.approx(float(row[name]), rel=1e-5) for epoch, row in enumerate(rows)}
    steps = board("validation", "evaluation_loss_vs_iterations")
    assert list(steps) == [BATCHES * epoch for epoch in (1, 2, 3, 4)]


def test_tensorboard_shows_every_nth_batch_of_all_workers(train, tmp_path, board):
    train(
        "keras.callbacks.TensorBoard(FOLDER + '/board', update_freq=8), keras.callbacks.CSVLogger(FOLDER + '/log.csv')",
        epochs=2,
        num_workers=2,
    )
    losses = board("train", "batch_loss")
    assert list(losses) == [8, 16, 24, 32, 40]
    last = float(rows_of(tmp_path / "log.csv")[1]["loss"])  # of the epoch, whose last batch is the 40th
    assert losses[40] == pytest.approx(last, rel=1e-4)
    # As in Keras, where the condition for batches holds for epochs, too: the 20th batch is no 8th one.
    assert list(board("train", "epoch_loss")) == [1]


# ---------------------------------------------------------------- TerminateOnNaN


def spoil(folder):
    with np.load(folder / "train.npz") as file:
        x, y = file["x"], file["y"].copy()
    y[200] = np.inf
    np.savez(folder / "train.npz", x=x, y=y)


def test_terminate_on_nan_ends_the_job_in_order(train, tmp_path):
    spoil(tmp_path)
    summary, _ = train(
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


def test_without_terminate_on_nan_or_with_its_error_the_job_fails(train, tmp_path):
    spoil(tmp_path)
    with pytest.raises(JobFailedError, match="the loss"):
        train("keras.callbacks.CSVLogger(FOLDER + '/log.csv')")
    with pytest.raises(JobFailedError, match=r"TerminateOnNaN failed in on_train_batch_end .*NaN or Inf loss"):
        train("keras.callbacks.TerminateOnNaN(raise_error=True)")
