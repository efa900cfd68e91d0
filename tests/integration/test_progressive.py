"""Test, then train: what ProgressiveMetrics logs is what Keras's own evaluation of each batch would be."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb.callbacks import ProgressiveMetrics
from elasticcb.errors import CallbackError

RECORDS, BATCH = 96, 8


def made():
    keras.utils.set_random_seed(3)
    ids, numbers = keras.Input((), dtype="int64", name="id"), keras.Input((2,), name="numbers")
    hidden = keras.layers.Concatenate()([keras.layers.Embedding(7, 3)(ids), numbers])
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4, "relu")(hidden))  # another result in training
    model = keras.Model({"id": ids, "numbers": numbers}, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc"), "mae"])
    return model


def data():
    random = np.random.default_rng(0)
    x = {"id": random.integers(0, 7, RECORDS), "numbers": random.normal(size=(RECORDS, 2)).astype("float32")}
    return x, (random.random((RECORDS, 1)) < 0.5).astype("float32")


def test_metrics_of_batches_before_they_are_trained_are_those_of_keras():
    x, y = data()
    with elasticcb.Cluster(num_workers=1, kind="inprocess", updates="sync") as cluster:
        model = made()
        found = cluster.fit(
            model, x, y, batch_size=BATCH, epochs=2, shuffle=False, callbacks=[ProgressiveMetrics()], verbose=0
        ).history
        plain = made()
        expected = cluster.fit(plain, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    for name, values in expected.items():  # the training itself does not change
        np.testing.assert_allclose(found[name], values, rtol=1e-6)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)

    oracle, progressive = made(), []
    for _ in range(2):
        results = []
        for start in range(0, RECORDS, BATCH):
            part = {name: values[start : start + BATCH] for name, values in x.items()}
            results.append((oracle.predict_on_batch(part), y[start : start + BATCH]))
            oracle.train_on_batch(part, y[start : start + BATCH])
        predictions, labels = (np.concatenate(each) for each in zip(*results, strict=True))
        auc, error = keras.metrics.AUC(), keras.metrics.MeanAbsoluteError()
        auc.update_state(labels, predictions)
        error.update_state(labels, predictions)
        loss = keras.ops.mean(keras.losses.binary_crossentropy(labels, predictions))
        progressive.append([float(loss), float(auc.result()), float(error.result())])
    names = ["progressive_loss", "progressive_auc", "progressive_mae"]
    np.testing.assert_allclose(np.transpose([found[name] for name in names]), progressive, rtol=1e-5)


def test_a_metric_without_mergeable_state_is_refused():
    class Odd(keras.metrics.Metric):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seen = []

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen.append(1)

        def result(self):
            return 0.0

        def reset_state(self):
            self.seen = []

    x, y = data()
    model = made()
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=[Odd(name="odd")])
    with elasticcb.Cluster(num_workers=1, kind="inprocess") as cluster, pytest.raises(CallbackError, match="odd"):
        cluster.fit(model, x, y, callbacks=[ProgressiveMetrics()], verbose=0)
