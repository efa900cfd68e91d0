"""A worker that is much slower than the other, in a job of real processes."""

import re
from collections import Counter

import numpy as np
import pytest

from elasticcb.master import stragglers
from jobs import job_settings, linear_data, run_job, write_model_file

RECORDS, TASK = 1_600, 160
MODEL_FILE = """
    import os
    import time
    import keras
    import numpy as np
    import psutil
    import tensorflow as tf

    LEDGER = os.environ["LEDGER"]
    SLOW = psutil.Process().name() == "worker-1"

    def custom_model():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def note(labels):
        "Tells which records are trained: each has a label of its own."
        with open(f"{LEDGER}/{'slow' if SLOW else 'fast'}", "a") as file:
            if Pace.begun:  # not while the model is built
                file.write("".join(f"{label:.0f}\\n" for label in labels.reshape(-1)))
        return np.float32(0.0)

    def loss(labels, predictions):
        nothing = tf.numpy_function(note, [labels], tf.float32)
        return keras.losses.mean_squared_error(labels / 1600, predictions) + nothing

    def optimizer():
        return keras.optimizers.SGD(0.01)

    class Pace(keras.callbacks.Callback):
        begun = False

        def on_train_batch_begin(self, batch, logs=None):
            Pace.begun = True
            if SLOW:
                open(f"{LEDGER}/begun", "a").close()
            while not os.path.exists(f"{LEDGER}/begun"):
                time.sleep(0.05)

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.6 if SLOW else 0.06)

    def callbacks():
        return [Pace()]
"""


@pytest.mark.deep  # tests/master/test_stragglers.py has the decisions
def test_straggler_is_named_and_the_rest_of_its_tasks_goes_to_other_workers(tmp_path, monkeypatch):
    # It does few batches before the others are done, and take over the rest.
    monkeypatch.setattr(stragglers, "_LEAST_BATCHES", 1)
    monkeypatch.setattr(stragglers, "_LEAST_SECONDS", 0.1)
    monkeypatch.setattr(stragglers, "_WARM_UP_BATCHES", 1)
    path = write_model_file(tmp_path, MODEL_FILE, "slow")
    linear_data(tmp_path, train=RECORDS)
    x = np.load(tmp_path / "train.npz")["x"]
    np.savez(tmp_path / "train.npz", x=x, y=np.arange(RECORDS, dtype=np.float32)[:, None])
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    monkeypatch.setenv("LEDGER", str(ledger))
    settings = job_settings(
        path,
        tmp_path / "job",
        kind="local",
        training=str(tmp_path / "train.npz"),
        minibatch_size=8,
        num_minibatches_per_task=20,
        num_workers=3,
    )
    summary, display = run_job(settings)

    reason = r"Worker 1 is a straggler: [\d.]+ s per batch; the median of the others is [\d.]+ s\."
    assert [each for each in display.messages if re.fullmatch(reason, each)]
    assert any(status.stragglers == (1,) for status in display.statuses)
    assert summary.stragglers_ever == (1,)
    assert summary.tasks_split >= 1
    assert summary.records_per_epoch == (RECORDS,)
    assert summary.records_repeated == 0
    slow, fast = [(ledger / name).read_text().split() for name in ("slow", "fast")]
    times = Counter(map(int, slow + fast))
    assert sorted(times) == list(range(RECORDS))
    assert set(times.values()) == {1}
    assert len(slow) < 2 * TASK  # it had begun with one, and fetched another ahead
