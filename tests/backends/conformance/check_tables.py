"""Embedding tables: the rows come with each step, and their gradients go."""

import keras
import numpy as np
import pytest

import elasticcb
from check_steps import assert_same, hold, tensors
from compiled_models import BATCH, RECORDS, Y, batches, fit
from elasticcb.compute.registry import backend
from elasticcb.errors import ModelFileError
from elasticcb.layers import Embedding
from elasticcb.layers.table_layers import NotServableError
from elasticcb.settings import Mode

IDS = np.random.default_rng(0).integers(0, 40, (RECORDS, 3))
DIM = 4


def with_own_table(combiner="mean", **table):
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int64", name="ids")
    rows = Embedding(DIM, combiner=combiner, name="table", **table)(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(rows if combiner else keras.layers.Flatten()(rows)))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def with_native_tables():
    """One is called twice, as in a model of two towers; the other one reads ids that the model computes."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int64")
    table = keras.layers.Embedding(40, DIM, name="table")
    other = keras.layers.Embedding(11, DIM, name="other")
    parts = [table(ids[:, :1]), table(ids[:, 1:]), other(ids % 11)]
    x = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)(parts))
    model = keras.Model(ids, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def hold_tables(model, batch):
    """As `check_steps.hold`, with all embedding layers as tables; their rows, before they are given up."""
    rows = {i: np.array(each.numpy()) for i, each in enumerate(model.weights) if each.path.endswith("/embeddings")}
    held = hold(model, batch, threshold=0)
    assert {index for index, spec in enumerate(held.specs) if spec.table} == set(rows)
    return held, rows


def test_rows_of_a_batch_train_as_whole_tables_in_fit():
    reference, model = with_native_tables(), with_native_tables()
    fit(reference, IDS, Y)
    held, tables = hold_tables(model, tensors(next(batches(IDS))))
    computation = backend().computation(held)
    slots = {index: np.full_like(values, 0.1) for index, values in tables.items()}
    for version, batch in enumerate(batches(IDS)):
        prepared = computation.prepare(tensors(batch), Mode.TRAINING)
        result = computation.train(prepared, {index: tables[index][ids] for index, ids in prepared.ids.items()})
        assert result.shared["iterations"] == version
        assert set(result.rows) == set(tables)
        for index, (ids, gradients) in result.rows.items():
            assert len(np.unique(ids)) == len(ids)
            slots[index][ids] += gradients**2
            tables[index][ids] -= 0.1 * gradients / np.sqrt(slots[index][ids] + 1e-7)
    dense = {i: np.array(v.numpy()) for i, v in enumerate(model.weights) if i not in tables}
    assert_same([{**tables, **dense}[i] for i in range(len(held.specs))], [v.numpy() for v in reference.weights])


def test_a_model_of_nothing_but_tables_counts_its_steps():
    ids = keras.Input((3,), dtype="int64")
    parts = [keras.layers.Embedding(40, DIM)(ids[:, place]) for place in (0, 1)]
    model = keras.Model(ids, keras.layers.Dot(1)(parts))
    model.compile(keras.optimizers.Nadam(0.1), "mse")
    held, tables = hold_tables(model, tensors(next(batches(IDS))))
    computation = backend().computation(held)
    product = 1.0
    for version, batch in enumerate(batches(IDS)):
        prepared = computation.prepare(tensors(batch), Mode.TRAINING)
        result = computation.train(prepared, {index: tables[index][own] for index, own in prepared.ids.items()})
        shared = dict(result.shared)
        assert shared.pop("iterations") == version
        assert shared.pop("learning_rate") == np.float32(0.1)
        assert list(shared.values()) == [pytest.approx(product)]
        product *= 0.9 * (1 - 0.5 * 0.96 ** (version + 1))


@pytest.mark.parametrize(
    "combiner", ["mean", *(pytest.param(each, marks=pytest.mark.deep) for each in (None, "sum", "sqrtn"))]
)
def test_an_own_layer_in_a_step_gives_what_it_gives_by_itself(combiner):
    model = with_own_table(combiner)
    model.get_layer("table").set_rows(np.arange(40))
    expected = model.predict(IDS, verbose=0)
    _, rows = model.get_layer("table").rows()
    held, _ = hold_tables(model, tensors(next(batches(IDS))))
    computation = backend().computation(held)
    found = []
    for batch in batches(IDS):
        prepared = computation.prepare(tensors(batch[:1]), Mode.PREDICTION)
        found.append(computation.predict(prepared, {index: rows[ids] for index, ids in prepared.ids.items()}))
    assert_same(np.concatenate(found), expected)


def test_ids_are_of_64_bits():
    held, _ = hold_tables(with_own_table(), tensors((IDS[:BATCH], Y[:BATCH])))
    computation = backend().computation(held)
    ids = np.array([[1, 5_000_000_000, 2**40]] * BATCH)
    prepared = computation.prepare(tensors((ids, Y[:BATCH])), Mode.EVALUATION)
    assert [found.tolist() for found in prepared.ids.values()] == [[1, 5_000_000_000, 2**40]]
    assert prepared.ids[0].dtype == np.int64


def test_ids_out_of_range_are_told():
    held, _ = hold_tables(with_own_table(input_dim=40), tensors((IDS[:BATCH], Y[:BATCH])))
    computation = backend().computation(held)
    with pytest.raises(ModelFileError, match="was called with the id 40"):
        computation.prepare(tensors((IDS[:BATCH] + 40 - IDS[:BATCH].min(), Y[:BATCH])), Mode.EVALUATION)


def test_a_table_whose_variable_is_used_otherwise_is_refused_or_stays_dense():
    ids = keras.Input((3,), dtype="int64")
    layer = keras.layers.Embedding(40, DIM)
    x = keras.layers.Flatten()(layer(ids))

    class Tied(keras.layers.Layer):
        def call(self, x):
            return keras.ops.matmul(x[:, :DIM], keras.ops.transpose(layer.embeddings))[:, :1]

    model = keras.Model(ids, Tied()(x))
    model.compile("sgd", "mse")
    assert not any(spec.table for spec in hold(model, tensors((IDS[:BATCH], Y[:BATCH])), threshold=0).specs)


def test_ids_that_depend_on_rows_are_refused():
    ids = keras.Input((3,), dtype="int64")
    first, second = Embedding(1, name="first"), Embedding(DIM, name="second")
    found = keras.ops.cast(keras.ops.abs(first(ids)[..., 0]) * 10, "int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(second(found))))
    model.compile("sgd", "mse")
    with pytest.raises(NotServableError, match=r"'second': its ids depend on"):
        hold(model, tensors((IDS[:BATCH], Y[:BATCH])), threshold=0)


@pytest.mark.deep
def test_a_job_with_a_table_trains_as_fit(tmp_path):
    reference, model = with_own_table(), with_own_table()
    reference.get_layer("table").set_rows(np.arange(40))
    fit(reference, IDS, Y, epochs=2)
    with elasticcb.Cluster(1, 2, directory=tmp_path) as cluster:
        cluster.fit(model, IDS, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        predicted = cluster.predict(model, IDS, verbose=0)
    ids, rows = model.get_layer("table").rows()
    assert_same(rows, reference.get_layer("table").rows()[1][ids])
    assert_same(predicted, reference.predict(IDS, verbose=0))
    assert_same(predicted, model.predict(IDS, verbose=0))
