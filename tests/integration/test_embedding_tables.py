"""Embedding layers whose rows live on the parameter servers: the same results as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import elasticcb
from deep_cases import deep_but
from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.versions import find_latest
from elasticcb.errors import JobFailedError, UsageError
from elasticcb.layers import Embedding
from elasticcb.optimizers import RowWiseAdagrad

VOCABULARY = 300
IDS = np.random.default_rng(0).zipf(1.3, (320, 4)) % VOCABULARY
LABELS = (IDS.sum(1) % 7).astype("float32")[:, None]
ON_DISK = {"memory_bytes": 5000, "when_full": "disk"}  # less than half of the rows that a server holds


def model_of(embedding: keras.layers.Layer, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    ids = keras.Input((4,), dtype="int64")
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids)))
    model = keras.Model(ids, outputs)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def native_model(optimizer: keras.optimizers.Optimizer, **options: object) -> keras.Model:
    keras.utils.set_random_seed(1)
    return model_of(keras.layers.Embedding(VOCABULARY, 8, **options), optimizer)


def cluster(num_workers: int = 1, num_ps: int = 2, **options: object) -> elasticcb.Cluster:
    given = {"kind": "inprocess", "log_level": "ERROR", "embedding": tables(), **options}
    return elasticcb.Cluster(num_workers, num_ps, **given)


def tables(**options: Any) -> elasticcb.EmbeddingOptions:
    return elasticcb.EmbeddingOptions(threshold_bytes=1000, **options)


def tables_in(folder: Path) -> list[str]:
    variables = read_manifest(find_latest(folder))["variables"]
    return [variable["path"] for variable in variables if variable.get("table")]


@pytest.mark.parametrize("limits", [{}, ON_DISK], ids=["in memory", "half on disk"])
@pytest.mark.parametrize("jit_compile", deep_but([False, True], False))
def test_a_large_keras_embedding_trains_as_fit_does(tmp_path: Path, jit_compile: bool, limits: dict[str, Any]) -> None:
    ours, plain = native_model(keras.optimizers.SGD(0.1)), native_model(keras.optimizers.SGD(0.1))
    ours.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], jit_compile=jit_compile)
    with cluster(checkpoint_dir=tmp_path, embedding=tables(**limits)) as servers:
        history = servers.fit(ours, IDS, LABELS, batch_size=30, epochs=2, shuffle=False, verbose=0)
        evaluated = servers.evaluate(ours, IDS, LABELS, verbose=0)
        predicted = servers.predict(ours, IDS, verbose=0)
    expected = plain.fit(IDS, LABELS, batch_size=30, epochs=2, shuffle=False, verbose=0)
    assert tables_in(tmp_path) == [ours.weights[0].path]
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
    for own, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)
    assert evaluated == pytest.approx(plain.evaluate(IDS, LABELS, verbose=0), rel=1e-5)
    np.testing.assert_allclose(predicted, plain.predict(IDS, verbose=0), rtol=1e-4, atol=1e-5)


def towers(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """Two tables of one width, one of another, and dense layers."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), dtype="int64")
    layers = [keras.layers.Embedding(VOCABULARY, dim, name=f"table_{i}") for i, dim in enumerate((8, 8, 3))]
    found = keras.layers.Concatenate()([keras.layers.Flatten()(layer(inputs)) for layer in layers])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(80, "relu")(found)))
    model.compile(optimizer, "mse")
    return model


def row_wise_and_adam() -> keras.optimizers.Optimizer:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("This release of Keras has no MultiOptimizer.")
    inner = {".*embeddings": RowWiseAdagrad(0.1)}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), inner))


@pytest.mark.parametrize("updates", deep_but(["local", "sync", "async"], "local"))
def test_rows_with_one_accumulator_each_train_and_go_on_as_by_fit(tmp_path: Path, updates: str) -> None:
    ours, plain = (towers(row_wise_and_adam()) for _ in range(2))
    given = {"batch_size": 30, "shuffle": False, "verbose": 0}
    with cluster(updates=updates, checkpoint_dir=tmp_path) as servers:
        servers.fit(ours, IDS[:200], LABELS[:200], **given)
    assert len(tables_in(tmp_path)) == 3
    ours.save(tmp_path / "model.keras")
    ours = keras.saving.load_model(tmp_path / "model.keras")
    with cluster(num_ps=3, updates=updates) as servers:
        servers.fit(ours, IDS[200:], LABELS[200:], **given)
    for part in (slice(200), slice(200, None), slice(60)):
        plain.fit(IDS[part], LABELS[part], **given)
    ours.fit(IDS[:60], LABELS[:60], **given)
    pairs = zip(ours.weights + ours.optimizer.variables, plain.weights + plain.optimizer.variables, strict=True)
    for own, other in pairs:
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-5, atol=1e-5, err_msg=own.path)


@pytest.mark.parametrize(("max_staleness", "updates"), [pytest.param(0, "async", marks=pytest.mark.deep), (2, "local")])
def test_an_unbounded_embedding_learns_and_goes_on_learning(max_staleness: int, updates: str) -> None:
    keras.utils.set_random_seed(1)
    model = model_of(Embedding(8), keras.optimizers.Adam(0.03))
    ids = IDS.astype("int64") * 10**12
    exchange = elasticcb.ExchangeOptions(max_staleness=max_staleness)
    with cluster(num_workers=2, updates=updates, exchange=exchange) as servers:
        first = servers.fit(model, ids, LABELS, batch_size=16, epochs=2, verbose=0).history["loss"]
        held, rows = model.layers[1].rows()
        assert held.tolist() == np.unique(ids).tolist()
        assert rows.shape == (len(held), 8)
        assert servers.evaluate(model, ids, LABELS, verbose=0) == pytest.approx(
            model.evaluate(ids, LABELS, verbose=0), rel=1e-5
        )
        second = servers.fit(model, ids, LABELS, batch_size=16, epochs=2, verbose=0).history["loss"]
    assert first[0] > first[-1] > second[-1]
    assert int(model.optimizer.iterations.numpy()) == 80


def test_rows_age_on_from_one_fit_to_the_next_and_those_that_the_caller_gives_are_new() -> None:
    model = model_of(Embedding(8), keras.optimizers.SGD(0.01))
    ids = np.arange(320).reshape(80, 4)
    with cluster(embedding=tables(max_age=30)) as servers:
        for part in np.split(ids, 2):  # 20 versions each
            servers.fit(model, part, np.ones((40, 1)), batch_size=2, shuffle=False, verbose=0)
        # The last look for old rows was at version 39, and took those of the first versions.
        held, _ = model.layers[1].rows()
        assert 0 not in held
        assert set(range(80, 320)) <= set(held.tolist())
        # Rows that the caller gives count as trained when they come.
        model.layers[1].set_rows(np.arange(320))
        servers.fit(model, ids[40:], np.ones((40, 1)), batch_size=2, shuffle=False, verbose=0)
    assert model.layers[1].rows()[0].tolist() == list(range(320))


def test_slots_of_rows_go_on_where_the_next_fit_makes_more_rows() -> None:
    first, second = np.arange(80).reshape(20, 4), np.arange(60, 200).reshape(35, 4)
    model = model_of(Embedding(8), RowWiseAdagrad(0.1))
    whole = model_of(Embedding(8, name=model.layers[1].name), RowWiseAdagrad(0.1))
    whole.layers[-1].set_weights(model.layers[-1].get_weights())
    whole.layers[1].set_rows(np.arange(200))
    whole.compile(RowWiseAdagrad(0.1), "mse", metrics=["mae"])
    with cluster(updates="sync") as servers:
        for ids in (first, second):
            given = {"batch_size": 5, "shuffle": False, "verbose": 0}
            servers.fit(model, ids, np.ones((len(ids), 1)), **given)
            whole.fit(ids, np.ones((len(ids), 1)), **given)
    assert model.layers[1].rows()[0].tolist() == list(range(200))
    for own, other in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    model.fit(second, np.ones((35, 1)), verbose=0)  # by Keras, with the slots of all rows


def test_each_table_may_have_limits_and_a_dtype_of_rows_of_its_own() -> None:
    ids = np.arange(80).reshape(40, 2)  # each once
    inputs = keras.Input((2,), dtype="int64")
    own = {
        "own": {"min_count": 2},
        "job": {"rows_dtype": "bfloat16"},
        "full": {"max_rows": 5},
        "named": {"min_count": 2},
    }
    layers = {name: Embedding(4, combiner="sum", name=name, **given) for name, given in own.items()}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()([layer(inputs) for layer in layers.values()])))
    model.compile("sgd", "mse")
    by_name = {"named": {"min_count": 1, "max_rows": 12, "rows_dtype": "bfloat16"}}
    with cluster(embedding=tables(when_full="initial", tables=by_name)) as servers:
        servers.fit(model, ids, np.ones((40, 1)), batch_size=8, verbose=0)
        held = {name: len(layer.rows()[0]) for name, layer in layers.items()}
        assert held == {"own": 0, "job": 80, "full": 5, "named": 12}
        servers.fit(model, ids, np.ones((40, 1)), batch_size=8, epochs=2, verbose=0)
    assert len(layers["own"].rows()[0]) == 80
    halves = {name: layer.rows()[1].view(np.uint32) & 0xFFFF for name, layer in layers.items()}
    assert {name for name, low_bits in halves.items() if not low_bits.any()} == {"job", "named"}
    with (
        cluster(embedding=tables(tables={"nobody": {}})) as servers,
        pytest.raises(
            UsageError, match=r"EmbeddingOptions.tables sets 'nobody', .* are: 'own', 'job', 'full', 'named'"
        ),
    ):
        servers.fit(model, ids, np.ones((40, 1)), verbose=0)


def test_batch_whose_ids_a_table_cannot_hold_fails_the_job_at_its_first_try() -> None:
    model = model_of(Embedding(4, max_rows=5, name="small"), keras.optimizers.SGD())
    with (
        cluster() as servers,
        pytest.raises(JobFailedError, match=r"is full: .* Raise max_rows, or set") as caught,
    ):
        servers.fit(model, np.arange(40).reshape(10, 4), np.ones((10, 1)), batch_size=8, verbose=0)
    assert "retrying can't help" in str(caught.value)
    assert "It was tried" not in str(caught.value)


class SlowTable(keras.optimizers.Adagrad):
    """The learning rate of a table of rows of 3 is a quarter of the others'."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * (0.25 if variable.shape[-1] == 3 else 1))


@pytest.mark.parametrize("updates", deep_but(["local", "sync"], "local"))
def test_a_table_may_have_a_learning_rate_of_its_own(updates: str) -> None:
    ids = np.random.default_rng(0).permutation(VOCABULARY)[:, None]  # none twice: Keras squares each gradient
    ids, labels = np.concatenate([ids, ids], 0), np.concatenate([ids, ids], 0) / VOCABULARY

    def model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((1,), dtype="int64")
        layers = [Embedding(3, learning_rate_multiplier=0.25, name="slow"), Embedding(8, name="fast")]
        found = keras.layers.Concatenate()([layer(inputs) for layer in layers])
        made = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(found)))
        for layer in layers:
            layer.set_rows(np.arange(VOCABULARY))
        made.compile(optimizer, "mse")
        return made

    ours, plain = model(keras.optimizers.Adagrad(0.1)), model(SlowTable(0.1))
    given = {"batch_size": 30, "shuffle": False, "verbose": 0}
    with cluster(updates=updates) as servers:
        servers.fit(ours, ids, labels, **given)
    plain.fit(ids, labels, **given)
    for own, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def test_weights_of_ids_and_regularized_rows_train_as_in_one_process() -> None:
    factors = np.random.default_rng(1).uniform(size=IDS.shape).astype("float32")

    def model() -> keras.Model:
        ids, weights = keras.Input((4,), dtype="int64", name="ids"), keras.Input((4,), name="weights")
        table = Embedding(8, combiner="mean", embeddings_regularizer=keras.regularizers.L2(0.01), name="table")
        keras.utils.set_random_seed(1)
        made = keras.Model({"ids": ids, "weights": weights}, keras.layers.Dense(1)(table(ids, weights=weights)))
        table.set_rows(np.arange(VOCABULARY))
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    ours, plain = model(), model()
    given = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    with cluster() as servers:
        history = servers.fit(ours, {"ids": IDS, "weights": factors}, LABELS, **given)
    expected = plain.fit({"ids": IDS, "weights": factors}, LABELS, **given)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    for own, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", deep_but(["dense", "ragged"], "ragged"))
def test_strings_are_ids_without_a_vocabulary(kind: str) -> None:
    words = np.char.add("word ", IDS.astype(str))
    given = tf.constant(words) if kind == "dense" else tf.RaggedTensor.from_tensor(tf.constant(words))

    def model() -> keras.Model:
        inputs = keras.Input((4,) if kind == "dense" else (None,), dtype="string", ragged=kind == "ragged")
        keras.utils.set_random_seed(1)
        made = keras.Model(inputs, keras.layers.Dense(1)(Embedding(8, combiner="mean", name="words")(inputs)))
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    ours, plain = model(), model()
    with cluster(num_workers=1) as servers:
        servers.fit(ours, given, LABELS, batch_size=32, shuffle=False, verbose=0)
        predicted = servers.predict(ours, given, verbose=0)
    ids, _ = ours.layers[1].rows()
    assert len(ids) == len(np.unique(words))
    plain.layers[1].set_rows(ids)
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.fit(given, LABELS, batch_size=32, shuffle=False, verbose=0)
    for own, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(predicted, plain.predict(given, verbose=0), rtol=1e-4, atol=1e-5)


def test_a_fit_after_an_evaluation_trains_synchronous_rows_as_in_fit() -> None:
    ours, plain = native_model(keras.optimizers.SGD(0.1)), native_model(keras.optimizers.SGD(0.1))
    with cluster(updates="sync") as servers:
        servers.evaluate(ours, IDS, LABELS, batch_size=160, verbose=0)
        assert float(ours.optimizer.learning_rate.numpy()) == pytest.approx(0.1)  # which evaluation leaves alone
        servers.fit(ours, IDS, LABELS, batch_size=160, epochs=3, shuffle=False, verbose=0)
    plain.fit(IDS, LABELS, batch_size=160, epochs=3, shuffle=False, verbose=0)
    for own, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("updates", ["async", "local"])
def test_what_is_rounded_for_the_way_still_trains(updates: str) -> None:
    ours, plain = native_model(keras.optimizers.SGD(0.1)), native_model(keras.optimizers.SGD(0.1))
    with cluster(updates=updates, exchange=elasticcb.ExchangeOptions(wire_dtype="bfloat16")) as servers:
        servers.fit(ours, IDS, LABELS, batch_size=32, shuffle=False, verbose=0)
        predicted = servers.predict(ours, IDS, verbose=0)
    np.testing.assert_allclose(predicted, ours.predict(IDS, verbose=0), rtol=1e-6, atol=1e-6)  # nothing is rounded
    plain.fit(IDS, LABELS, batch_size=32, shuffle=False, verbose=0)
    for own, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        assert not np.array_equal(own, other)
        np.testing.assert_allclose(own, other, atol=0.02)
