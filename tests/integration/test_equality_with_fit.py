"""Several synchronous workers and Keras's own `fit`, fed the same batches, end at the same weights."""

import keras
import numpy as np

import elasticcb


def test_rounds_of_several_workers_are_the_steps_of_fit_on_the_joined_batch():
    """From the first batch of each epoch on, whatever the workers do between two epochs."""
    workers, rounds, size = 3, 4, 8
    generator = np.random.default_rng(5)
    x = generator.normal(size=(workers * rounds * size, 6)).astype("float32")
    y = x[:, :1] - x[:, 1:2]

    class Parts(keras.utils.PyDataset):
        def __len__(self):
            return workers * rounds

        def __getitem__(self, index):
            part = slice(index * size, (index + 1) * size)
            return x[part], y[part]

    def trained(fit, *data, **options):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), "mse")
        falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 / (1 + epoch))
        options |= {"epochs": 4, "shuffle": False, "verbose": 0, "callbacks": [falling]}
        history = fit(model, *data, validation_data=(x[:50], y[:50]), **options).history
        return model.get_weights(), history["val_loss"]

    expected, losses = trained(keras.Model.fit, x, y, batch_size=workers * size)
    with elasticcb.Cluster(workers, 2, updates="sync", log_level="WARNING") as cluster:
        weights, own_losses = trained(cluster.fit, Parts())
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
