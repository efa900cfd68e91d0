"""The callbacks that Keras ships, unmodified, in jobs: those that show or write what happens."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import tensorflow as tf
from stock_callbacks import BATCHES, rows_of, train

from elasticcb.settings import Command
from jobs import job_settings, run_job

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


def test_callbacks_that_keep_logs_see_every_epoch_and_every_batch(tmp_path, monitor):
    root, posted = monitor
    _, display = train(
        tmp_path,
        "keras.callbacks.CSVLogger(FOLDER + '/log.csv'), "
        f"keras.callbacks.RemoteMonitor({root!r}, path='/epochs', send_as_json=True), "
        "h := keras.callbacks.History(), keras.callbacks.LambdaCallback("
        "on_epoch_end=lambda epoch, logs: open(FOLDER + '/history', 'w').write(__import__('json').dumps(h.history))), "
        "keras.callbacks.LambdaCallback("
        "on_epoch_end=lambda epoch, logs: open(FOLDER + '/epochs', 'a').write(f'{epoch} '), "
        "on_train_batch_end=lambda batch, logs: open(FOLDER + '/batches', 'a').write(f'{batch} '))",
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


# ---------------------------------------------------------------- ProgbarLogger


def test_progbar_logger_draws_a_bar_over_the_batches_of_all_workers_and_follows_other_jobs(tmp_path, capsys):
    train(
        tmp_path,
        "keras.callbacks.ProgbarLogger(), keras.callbacks.CSVLogger(FOLDER + '/log.csv')",
        epochs=2,
        num_workers=2,
        directory=str(tmp_path / "checkpoints"),
    )
    shown = re.sub(r"\x1b\[\d+m|\x08", "", capsys.readouterr().out)
    assert re.findall(r"Epoch \d/\d", shown) == ["Epoch 1/2", "Epoch 2/2"]
    steps = [int(step) for step in re.findall(r"(\d+)/20 ", shown)]
    assert steps.count(20) >= 2
    assert set(steps) <= set(range(1, 21))
    for row in rows_of(tmp_path / "log.csv"):
        assert f"val_loss: {float(row['val_loss']):.4f}" in shown

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


# ---------------------------------------------------------------- TensorBoard


@pytest.fixture
def board(tmp_path):
    """Reads what TensorBoard wrote: steps by run and tag."""

    def read(run, tag):
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

        events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "board")).Reload().Tensors(run, tag)
        return {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in events}

    return read


def test_tensorboard_shows_every_nth_batch_of_all_workers(tmp_path, board):
    train(
        tmp_path,
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
