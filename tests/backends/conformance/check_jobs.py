"""Whole jobs of `Cluster`, whose workers compute on the backend of this process and whose servers on TensorFlow."""

import keras
import numpy as np
import pytest

import elasticcb
from check_steps import assert_same
from compiled_models import BATCH, X, Y, batches, dense, fit

SAME = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def assert_trains_as_fit(updates, tmp_path, servers):
    reference, model = dense(), dense()
    expected = fit(reference, epochs=2, validation_data=(X, Y))
    with elasticcb.Cluster(1, servers, updates=updates, directory=tmp_path) as cluster:
        found = cluster.fit(model, X, Y, epochs=2, validation_data=(X, Y), **SAME).history
    assert_same(found, expected, 1e-4)
    assert_same([each.numpy() for each in model.weights], [each.numpy() for each in reference.weights])
    state = [
        (each.numpy(), other.numpy())
        for each, other in zip(model.optimizer.variables, reference.optimizer.variables, strict=True)
    ]
    assert_same([one for one, _ in state], [other for _, other in state])


def test_one_worker_trains_as_fit(tmp_path):
    assert_trains_as_fit("local", tmp_path, servers=1)  # each server imports TensorFlow for itself


WIDE_IDS = np.array([3, 2**31 + 3, 2**32 + 3, 2**53, 2**53 + 1, 2**63 - 2])  # some are equal in 32 bits


def of_hashed_ids():
    ids = keras.Input((1,), dtype="int64", name="id")
    x = keras.layers.Flatten()(elasticcb.layers.Embedding(4, name="rows")(ids))
    model = keras.Model({"id": ids}, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def test_two_workers_evaluate_and_predict_as_keras(tmp_path):
    model = dense()
    fit(model)
    with elasticcb.Cluster(2, 1, directory=tmp_path) as cluster:
        found = cluster.evaluate(model, X, Y, batch_size=BATCH, verbose=0, return_dict=True)
        assert_same(found, model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True))
        assert_same(cluster.predict(model, X, batch_size=BATCH, verbose=0), model.predict(X, verbose=0))

        model, ids = of_hashed_ids(), np.tile(WIDE_IDS, 16)[:, None]
        x, y = {"id": ids}, np.searchsorted(WIDE_IDS, ids).astype("float32")
        for _ in range(2):
            cluster.fit(model, x, y, validation_data=(x, y), epochs=15, batch_size=BATCH, verbose=0)
        assert sorted(model.get_layer("rows").rows()[0].tolist()) == WIDE_IDS.tolist()
        assert cluster.evaluate(model, x, y, verbose=0) < 0.5
        assert len(np.unique(cluster.predict(model, {"id": WIDE_IDS[:, None]}, verbose=0))) == len(WIDE_IDS)


def test_functions_train_a_placed_model_as_keras_does(tmp_path):
    reference, model = dense(), dense()

    def step(x, y):
        return keras.ops.convert_to_tensor(model.train_on_batch(x, y))

    with elasticcb.Cluster(1, 1, directory=tmp_path) as cluster:
        cluster.place(model)
        values = [cluster.schedule(step, x, y) for x, y in batches()]
        cluster.join()
        assert all(isinstance(value, np.ndarray) for value in cluster.fetch(values))
    for x, y in batches():
        reference.train_on_batch(x, y)
    assert_same([each.numpy() for each in model.weights], [each.numpy() for each in reference.weights])
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)


@pytest.mark.deep
@pytest.mark.parametrize("updates", ["sync", "async"])
def test_one_worker_in_other_modes_trains_as_fit(updates, tmp_path):
    assert_trains_as_fit(updates, tmp_path, servers=2)


def test_threads_can_t_be_servers_of_another_backend():
    with pytest.raises(elasticcb.errors.UsageError, match="parameter servers need 'tensorflow'"):
        elasticcb.Cluster(kind="inprocess")
