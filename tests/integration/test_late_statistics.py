"""Moving statistics of workers whose pushes are late."""

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb import ExchangeOptions

X = np.random.default_rng(0).normal(3.0, 2.0, (640, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
VARIANCES = X.reshape(-1, 16, 3).var(1)


def model():
    keras.utils.set_random_seed(0)
    norm = keras.layers.BatchNormalization(momentum=0.9)
    network = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(1)])
    network.compile(keras.optimizers.SGD(0.01), "mse")
    return network


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (1, {"exchange": ExchangeOptions(max_staleness=3), "updates": "async"}),
        (3, {"updates": "async"}),
        (3, {"updates": "local"}),
    ],
)
def test_statistics_are_those_of_all_batches_however_late_pushes_are(num_workers, options):
    ours, plain = model(), model()
    with elasticcb.Cluster(num_workers, 2, kind="inprocess", log_level="ERROR", **options) as cluster:
        cluster.fit(ours, X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    plain.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    mean, variance = ours.layers[0].moving_mean.numpy(), ours.layers[0].moving_variance.numpy()
    if num_workers == 1:  # the batches come in the same order
        np.testing.assert_allclose(mean, plain.layers[0].moving_mean.numpy(), rtol=1e-4)
        np.testing.assert_allclose(variance, plain.layers[0].moving_variance.numpy(), rtol=1e-4)
    assert (variance >= VARIANCES.min(0)).all()
    assert (variance <= VARIANCES.max(0)).all()
