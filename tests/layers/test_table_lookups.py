"""Rows that come from elsewhere: the same steps as with native layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers_tables import (
    DIM,
    MODELS,
    ROWS,
    Served,
    all_rows,
    compiled,
    dense,
    features,
    found_tables,
    gradients,
    tables_of,
)

from deep_cases import deep_but
from elasticcb.compute.tensorflow.backend import TensorFlowTables
from elasticcb.errors import ModelFileError
from elasticcb.layers import Embedding
from elasticcb.layers.table_layers import NotServableError

CASES = [(name, "keras") for name in MODELS]
CASES += [(name, kind) for name, kind in zip(MODELS, ["unbounded", "own"] * 3, strict=True)]
KEPT = [("subclass", "keras"), ("functional", "unbounded"), ("nested", "own"), ("ragged", "unbounded")]


@pytest.fixture(scope="module", params=deep_but(CASES, *KEPT), ids="-".join)
def case(request):
    """A served model, a batch, and the same model with native layers."""
    name, kind = request.param
    model, batch = compiled(name, kind)
    reference = native(name, model, batch)
    return name, Served(model, tables_of(model, batch)), batch, reference


def native(name, model, batch):
    """The same model with keras.layers.Embedding, and the same weights."""
    reference, _ = compiled(name, "keras")
    rows = all_rows(model, tables_of(model, batch))
    reference.set_weights([rows[i].numpy() if i in rows else v.numpy() for i, v in enumerate(model.weights)])
    return reference


def test_gradients_of_a_step_on_served_rows_are_those_of_keras_embedding(case):
    _, served, batch, reference = case
    model = served.model
    expected = gradients(reference, lambda step: tf.function(step, autograph=False)(batch))
    wanted, given = gradients(model, lambda step: served.run(step, batch))
    assert wanted
    assert given.keys() == expected.keys()
    for index, gradient in given.items():
        assert isinstance(gradient, tf.IndexedSlices) == (index in wanted)
        ids = wanted[index][0] if index in wanted else None
        np.testing.assert_array_equal(dense(gradient, ids), dense(expected[index]), model.weights[index].path)


def test_evaluation_and_prediction_on_served_rows_are_those_of_keras_embedding(case):
    _, served, (x, y), reference = case
    model = served.model
    _, logs = served.run(model.test_step, (x, y))
    expected = tf.function(reference.test_step, autograph=False)((x, y))
    assert {name: value.numpy() for name, value in logs.items()} == {n: v.numpy() for n, v in expected.items()}
    _, outputs = served.run(lambda x: model.predict_step((x,)), x)
    np.testing.assert_array_equal(outputs, reference.predict_step((x,)))


def test_lookups_change_neither_metrics_nor_weights_nor_seeds(case):
    _, served, batch, _ = case
    model = served.model
    variables = [variable for variable in model.variables if not variable.path.endswith("embeddings")]
    before = [variable.numpy() for variable in variables]
    served.tables.lookups(model.train_step)(batch)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, value, variable.path)


def test_unique_ids_and_positions_give_the_ids_of_each_call_in_any_batch(case):
    name, served, _, _ = case
    lookups = served.tables.lookups(lambda x: served.model.predict_step((x,)))
    for size, seed in ((8, 0), (5, 1), (1, 2), (8, 3)):
        x = features(name, size, seed)
        for ids, places in lookups(x).values():
            assert ids.dtype == tf.int64
            assert len(set(ids.numpy())) == len(ids)
            assert places
            assert {p for part in places for p in part.numpy().ravel()} == set(range(len(ids)))
    if name == "nested":
        ((ids, places),) = lookups(x).values()
        np.testing.assert_array_equal(tf.stack([tf.gather(ids, part) for part in places], 1), x)


@pytest.mark.parametrize("kind", ["keras", "own"])
def test_released_layers_are_native_again(kind):
    model, batch = compiled("nested", kind)
    tables = tables_of(model, batch)
    shapes = [variable.shape for variable in model.weights]
    TensorFlowTables(model, tables).release()
    assert [variable.shape for variable in model.weights] == shapes
    model.test_step(batch)
    assert not np.any(model.weights[next(iter(tables))].numpy())


def small(layer, length=4):
    ids = keras.Input((length,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids))))
    model.compile("sgd", "mse")
    return model, (tf.constant([[0, 1, 2, 3]]), tf.constant([[1.0]]))


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_id_out_of_range_is_told_with_its_layer(wrong):
    model, batch = small(Embedding(DIM, ROWS, name="words"))
    lookups = TensorFlowTables(model, tables_of(model, batch)).lookups(model.train_step)
    with pytest.raises(ModelFileError, match=rf"'words'.*id {wrong}.*input_dim={ROWS}"):
        lookups((tf.constant([[0, 1, wrong, 3]]), batch[1]))


def test_negative_ids_count_from_the_end_as_for_keras():
    model, batch = small(keras.layers.Embedding(ROWS, DIM))
    lookups = TensorFlowTables(model, tables_of(model, batch)).lookups(model.train_step)
    ((ids, _),) = lookups((tf.constant([[0, -1, 39, -40]]), batch[1])).values()
    assert sorted(ids.numpy()) == [0, 39]


def test_large_ids_are_not_cut_off():
    model, batch = small(Embedding(DIM))
    lookups = TensorFlowTables(model, tables_of(model, batch)).lookups(model.train_step)
    ((ids, _),) = lookups((tf.constant([[2**62, 5, 2**33, 5]]), batch[1])).values()
    assert list(ids.numpy()) == [2**62, 5, 2**33]


def test_batches_of_other_lengths_need_one_more_trace_and_no_more():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = Embedding(DIM)
            self.traces = 0

        def call(self, ids):
            self.traces += 1
            return tf.reduce_sum(self.embedding(ids), [1, 2])

    model = Model()
    model(tf.constant([[1, 2]]))
    served = TensorFlowTables(model, {0: model.embedding.table_spec()})
    lookups = served.lookups(model)
    model.traces = 0
    for length in (2, 3, 4, 5, 2):
        lookups(tf.zeros([3, length], tf.int64))
    assert model.traces == 2


def test_tables_that_are_asked_for_the_same_ids_share_them():
    ids = keras.Input((4,), dtype="int32")
    both = [keras.layers.Flatten()(layer(ids)) for layer in (keras.layers.Embedding(ROWS, dim) for dim in (1, DIM))]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(both)))
    served = TensorFlowTables(model, found_tables(model, model, tf.ones([2, 4], tf.int32)))
    one, other = served.lookups(model)(tf.constant([[3, 3, 1, 2]], tf.int32)).values()
    assert one[0] is other[0]


def test_a_model_called_outside_a_step_says_where_its_rows_are():
    model, batch = small(Embedding(DIM, name="words"))
    TensorFlowTables(model, tables_of(model, batch))
    with pytest.raises(ModelFileError, match="outside a step of the job, but its embedding layer 'words'"):
        model(batch[0])


def test_a_step_that_calls_a_layer_more_often_than_expected_is_refused():
    model, (x, _) = small(Embedding(DIM, name="words"))
    served = TensorFlowTables(model, {0: model.layers[1].table_spec()})
    ids, places = served.lookups(model)(x)[0]
    with (
        pytest.raises(NotServableError, match="'words' more than the 1 time for"),
        served.serving({0: tf.zeros([len(ids), DIM])}, {0: places}),
    ):
        model(model(x) * 0 + tf.cast(x, tf.float32))


def test_model_in_other_processes_must_have_the_same_layers():
    model, _ = small(Embedding(DIM))
    with pytest.raises(ModelFileError, match="must be the same in every process"):
        TensorFlowTables(model, {1: model.layers[1].table_spec()})
