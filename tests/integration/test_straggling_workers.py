"""A worker that is much slower than the other, in a job of real processes."""

import re
from collections import Counter

import numpy as np

from jobs import linear_data, number, train_flags, write_model_file

RECORDS, TASK = 1_600, 160
MODEL_FILE = """
    import os
    import time
    import keras
    import numpy as np
    import psutil
    import tensorflow as tf

    LEDGER = os.environ["LEDGER"]
    SLOW = "--index 1" in " ".join(psutil.Process().cmdline())

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
            time.sleep(0.6 if SLOW else 0.03)

    def callbacks():
        return [Pace()]
"""


def test_straggler_is_named_and_the_rest_of_its_tasks_goes_to_the_other_worker(tmp_path, start_job, monkeypatch):
    write_model_file(tmp_path, MODEL_FILE, "slow")
    linear_data(tmp_path, train=RECORDS)
    x = np.load(tmp_path / "train.npz")["x"]
    np.savez(tmp_path / "train.npz", x=x, y=np.arange(RECORDS, dtype=np.float32)[:, None])
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    monkeypatch.setenv("LEDGER", str(ledger))
    flags = train_flags(tmp_path, "slow", num_minibatches_per_task=20)
    job = start_job("train", *(flag for flag in flags if not flag.startswith("--validation_data")))
    assert job.finish() == 0, job.output

    assert re.search(r"Worker 1 is a straggler: [\d.]+ s per batch, the median of the others is [\d.]+ s\.", job.output)
    assert re.search(r"workers 2/2 \(slow: 1\)", job.output)
    assert re.search(r"stragglers among the workers +1\n", job.output)
    assert number(job.output, "tasks split for idle workers") >= 1
    assert number(job.output, "records trained in epoch 1") == RECORDS
    assert number(job.output, "records trained more than once") == 0
    slow, fast = [(ledger / name).read_text().split() for name in ("slow", "fast")]
    times = Counter(map(int, slow + fast))
    assert sorted(times) == list(range(RECORDS))
    assert set(times.values()) == {1}
    assert len(slow) < 2 * TASK  # it had begun with one, and fetched another ahead
    job.assert_no_orphans()
