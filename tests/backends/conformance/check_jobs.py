"""Whole jobs of `Cluster`, whose workers compute on the backend of this process and whose servers on TensorFlow."""

import pytest

import elasticcb
from check_steps import assert_same
from compiled_models import BATCH, X, Y, dense, fit

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


def test_two_workers_evaluate_and_predict_as_keras(tmp_path):
    model = dense()
    fit(model)
    with elasticcb.Cluster(2, 1, directory=tmp_path) as cluster:
        found = cluster.evaluate(model, X, Y, batch_size=BATCH, verbose=0, return_dict=True)
        assert_same(found, model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True))
        assert_same(cluster.predict(model, X, batch_size=BATCH, verbose=0), model.predict(X, verbose=0))


@pytest.mark.deep
@pytest.mark.parametrize("updates", ["sync", "async"])
def test_one_worker_whose_gradients_servers_apply_trains_as_fit(updates, tmp_path):
    assert_trains_as_fit(updates, tmp_path, servers=2)


def test_threads_can_t_be_servers_of_another_backend():
    with pytest.raises(elasticcb.errors.UsageError, match="parameter servers need 'tensorflow'"):
        elasticcb.Cluster(kind="inprocess")
