"""The layer outside a job: rows that it holds, initial values for the rest."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.errors import ModelFileError, UsageError
from elasticcb.layers import Embedding
from elasticcb.settings.table import TableOptions

HELD = np.array([9, 2, 2**40])
ROWS = np.arange(1.0, 10.0, dtype="float32").reshape(3, 3)


def holding(**kwargs):
    layer = Embedding(3, name="words", **kwargs)
    layer.set_rows(HELD, ROWS)
    return layer


def test_held_ids_get_their_rows_and_others_their_initial_value():
    layer = holding(embeddings_initializer=keras.initializers.Constant(0.5))
    found = layer(tf.constant([[9, 5], [2**40, 2]]))
    np.testing.assert_array_equal(found, [[ROWS[0], [0.5] * 3], [ROWS[2], ROWS[1]]])
    ids, rows = layer.rows()
    np.testing.assert_array_equal(ids, [2, 9, 2**40])
    np.testing.assert_array_equal(rows, ROWS[[1, 0, 2]])


@pytest.mark.parametrize("when", ["made", "before it is built", "after it is built"])
def test_a_frozen_layer_is_not_trained_until_it_is_thawed(when):
    layer = Embedding(3, trainable=when != "made")
    if when == "before it is built":
        layer.trainable = False
    model = keras.Sequential([keras.Input((), dtype="int64"), layer])
    if when == "after it is built":
        layer.trainable = False
    layer.set_rows(HELD, ROWS)
    assert model.trainable_variables == []
    layer.trainable = True
    model.compile("sgd", "mse")
    model.fit(HELD, np.zeros((3, 3)), verbose=0)
    assert (layer.rows()[1] != ROWS[[1, 0, 2]]).all()


def test_layer_without_rows_gives_initial_values_of_its_seed():
    one, same, other = Embedding(3, seed=1), Embedding(3, seed=1), Embedding(3, seed=2)
    ids = tf.constant([1, 2, 1])
    np.testing.assert_array_equal(one(ids), same(ids))
    assert not np.any(one(ids).numpy() == other(ids).numpy())
    assert not np.any(Embedding(3, name="a")(ids).numpy() == Embedding(3, name="b")(ids).numpy())
    np.testing.assert_array_equal(Embedding(3, name="a")(ids), Embedding(3, name="a")(ids))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_ids_of_any_integer_dtype_and_shape(dtype):
    layer = holding()
    for shape in ((), (0,), (2,), (2, 3, 4)):
        ids = tf.fill(shape, tf.constant(9, dtype))
        np.testing.assert_array_equal(layer(ids), np.broadcast_to(ROWS[0], (*shape, 3)))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["sparse", "ragged", "dense"])
def test_combiners_and_weights_of_ids_are_those_of_tensorflow(combiner, kind):
    table = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    layer = Embedding(3, 6, combiner=combiner)
    layer.set_rows(np.arange(6), table)
    lists = [[1, 5], [2, 4], [3, 3]] if kind == "dense" else [[1, 5, 1], [], [2], [0, 3]]
    factors = [[0.5, 2.0], [1.0, 0.25], [3.0, 0.0]] if kind == "dense" else [[0.5, 2.0, 1.0], [], [4.0], [0.25, 0.75]]
    ids, weights = tf.ragged.constant(lists, dtype=tf.int64), tf.ragged.constant(factors, dtype=tf.float32)
    expected = tf.nn.safe_embedding_lookup_sparse(
        table, ids.to_sparse(), tf.RaggedTensor.to_sparse(weights), combiner=combiner, allow_fast_lookup=True
    )
    change = {"sparse": tf.RaggedTensor.to_sparse, "ragged": lambda x: x, "dense": tf.RaggedTensor.to_tensor}[kind]
    np.testing.assert_allclose(layer(change(ids), weights=change(weights)), expected, rtol=1e-6)
    expected = tf.nn.safe_embedding_lookup_sparse(table, ids.to_sparse(), combiner=combiner)
    np.testing.assert_allclose(layer(change(ids)), expected, rtol=1e-6)


def test_weights_of_ids_are_trained_and_leave_padding_out():
    layer = holding(combiner="mean", mask_zero=True)
    ids, weights = tf.constant([[9, 2, 0]]), tf.Variable([[1.0, 3.0, 7.0]])
    with tf.GradientTape() as tape:
        result = layer(ids, weights=weights)
    np.testing.assert_allclose(result, [(ROWS[0] + 3 * ROWS[1]) / 4], rtol=1e-6)
    gradient = tape.gradient(result, weights)
    assert gradient[0, 0] != 0
    assert gradient[0, 2] == 0


def test_symbolic_weights_of_ids():
    ids, weights = keras.Input((4,), dtype="int64"), keras.Input((4,))
    model = keras.Model([ids, weights], holding(combiner="sum")(ids, weights=weights))
    given = np.array([[9, 2, 2, 9]]), np.array([[1.0, 2.0, 0.0, 0.5]], "float32")
    np.testing.assert_allclose(model(given), [1.5 * ROWS[0] + 2 * ROWS[1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("combiner", "weights", "message"),
    [
        (None, np.ones((1, 2), "float32"), "has no combiner"),
        ("sum", tf.ragged.constant([[1.0, 2.0]]), "the same type"),
        ("sum", np.ones((1, 3), "float32"), r"shape \(1, 2\) and weights of shape \(1, 3\)"),
    ],
)
def test_weights_of_ids_that_do_not_fit_are_refused(combiner, weights, message):
    with pytest.raises(ModelFileError, match=message):
        holding(combiner=combiner)(tf.constant([[9, 2]]), weights=weights)


def test_regularizer_counts_each_row_of_a_batch_once():
    layer = holding(embeddings_regularizer=keras.regularizers.L2(0.1))
    layer(tf.constant([[9, 2], [9, 9]]))
    assert float(sum(layer.losses)) == pytest.approx(0.1 * np.square(ROWS[:2]).sum())
    padded = holding(embeddings_regularizer="l1", mask_zero=True, combiner="sum")
    padded(tf.constant([[9, 0], [0, 0]]))
    assert float(sum(padded.losses)) == pytest.approx(0.01 * ROWS[0].sum())
    again = Embedding.from_config(layer.get_config())
    assert again.embeddings_regularizer.l2 == pytest.approx(0.1)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_combined_dense_ids_leave_padding_out_when_it_is_masked(combiner):
    padded, ragged = tf.constant([[9, 2, 0], [0, 0, 0], [2, 2, 2]]), tf.ragged.constant([[9, 2], [], [2, 2, 2]])
    layer, masking = holding(combiner=combiner), holding(combiner=combiner, mask_zero=True)
    np.testing.assert_allclose(masking(padded), layer(ragged), rtol=1e-6)
    np.testing.assert_allclose(masking(tf.RaggedTensor.from_tensor(padded)), layer(ragged), rtol=1e-6)
    assert layer(padded).shape == (3, 3)
    assert masking.compute_mask(padded) is None


def test_deeper_ids_are_combined_along_their_last_axis():
    layer = holding(combiner="sum")
    nested = tf.ragged.constant([[[9, 2], [2]], [[]]], dtype=tf.int64)
    assert layer(nested).to_list() == [[(ROWS[0] + ROWS[1]).tolist(), ROWS[1].tolist()], [[0, 0, 0]]]
    cube = tf.constant([[[9, 2], [2, 2]]])
    np.testing.assert_array_equal(layer(tf.sparse.from_dense(cube)), layer(cube))
    assert layer(cube).shape == (1, 2, 3)


def test_ragged_ids_without_combiner_give_ragged_vectors():
    found = holding()(tf.ragged.constant([[9], [], [2, 9]]))
    assert found.to_list() == [[ROWS[0].tolist()], [], [ROWS[1].tolist(), ROWS[0].tolist()]]


def test_sparse_ids_without_combiner_count_absent_ones_as_zero():
    dense = tf.constant([[9, 0], [0, 2]])
    layer = holding()
    np.testing.assert_array_equal(layer(tf.sparse.from_dense(dense)), layer(dense))


def test_symbolic_shapes_and_masks_are_those_of_keras():
    ids = keras.Input((5,), dtype="int32")
    assert Embedding(3)(ids).shape == (None, 5, 3)
    assert Embedding(3, combiner="mean")(ids).shape == (None, 3)
    assert Embedding(3)(keras.Input((None,), dtype="int32", ragged=True)).ragged
    assert not Embedding(3, combiner="sum")(keras.Input((None,), dtype="int32", ragged=True)).ragged
    np.testing.assert_array_equal(Embedding(3, mask_zero=True).compute_mask(tf.constant([1, 0])), [True, False])
    assert Embedding(3, dtype="mixed_float16")(ids).dtype == "float16"


def test_held_rows_are_trained_outside_a_job():
    layer = holding()
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.array([[9, 7], [9, 2]]), np.ones(2), verbose=0)
    changed = (layer.rows()[1] != ROWS[[1, 0, 2]]).any(axis=1)
    assert changed.tolist() == [True, True, False]


def test_rows_given_without_values_are_initial_ones():
    layer = Embedding(3, 100)
    before = layer(tf.range(5))
    layer.set_rows(range(5))
    np.testing.assert_array_equal(layer.rows()[1], before)


def test_model_keeps_ids_and_rows_in_its_files(tmp_path):
    def model():
        ids = keras.Input((2,), dtype="int64")
        return keras.Model(ids, Embedding(3, name="words", combiner="sum", mask_zero=True, seed=4)(ids))

    one, x = model(), tf.constant([[9, 2], [2**40, 77]])
    one.layers[1].set_rows(HELD, ROWS)
    one.save(tmp_path / "whole.keras")
    one.save_weights(tmp_path / "some.weights.h5")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    np.testing.assert_array_equal(loaded(x), one(x))
    other = model()
    other.load_weights(tmp_path / "some.weights.h5")
    np.testing.assert_array_equal(other(x), one(x))
    assert len(one.weights) == 1
    empty = model()
    empty.save(tmp_path / "empty.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "empty.keras")(x), empty(x))


def test_files_keep_what_an_optimizer_has_learned_of_rows(tmp_path):
    ids = keras.Input((2,), dtype="int64")
    model = keras.Model(ids, Embedding(3, name="words", combiner="sum", seed=4)(ids))
    model.layers[1].set_rows(HELD, ROWS)
    model.compile("adam", "mse")
    x, y = np.array([[9, 2], [7, 9]]), np.ones((2, 3))
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "whole.keras")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    assert loaded.fit(x, y, epochs=2, verbose=0).history == model.fit(x, y, epochs=2, verbose=0).history
    untrained = keras.models.model_from_json(model.to_json())
    np.testing.assert_array_equal(untrained(x), Embedding(3, combiner="sum", seed=4)(x))
    untrained.compile("adam", "mse")
    untrained.fit(x, y, verbose=0)


@pytest.mark.parametrize("wrong", [-1, 10])
def test_id_out_of_range_is_refused(wrong):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'words' was called with ids out of range.*input_dim=10"):
        Embedding(3, 10, name="words")(tf.constant([wrong]))


def test_what_can_not_hold_the_ids_is_refused():
    with pytest.raises(ModelFileError, match=r"strings.*input_dim=9.*keras.layers.Hashing"):
        Embedding(3, 9)(tf.constant(["a"]))
    with pytest.raises(ModelFileError, match=r"given bool of shape \(1,\)\. It takes integers or strings"):
        Embedding(3)(tf.constant([True]))
    with pytest.raises(ModelFileError, match="float32 represents only ids up to 16777216 exactly"):
        Embedding(3)(tf.constant([1.0]))
    assert Embedding(3, 1000)(tf.constant([1.0])).shape == (1, 3)


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        ([1, 2], np.zeros((3, 3)), r"Expected ids \[n\] and rows \[n, 3\]"),
        ([1, 2], np.zeros((2, 4)), r"have shape \(2, 4\)"),
        ([2, 1, 2], np.zeros((3, 3)), "several rows of the same id"),
        ([1, -1], np.zeros((2, 3)), "from -1 to 1"),
        ([1, 10], np.zeros((2, 3)), "below input_dim=10"),
    ],
)
def test_rows_that_do_not_fit_are_refused(ids, rows, message):
    with pytest.raises(UsageError, match=message):
        Embedding(3, 10).set_rows(ids, rows)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"output_dim": 0}, "output_dim"),
        ({"input_dim": 1.5}, "input_dim"),
        ({"min_count": 0}, "min_count=0 .* at least 1"),
        *(({"learning_rate_multiplier": each}, "learning_rate_multiplier=") for each in (0, float("nan"), True, "0.1")),
        ({"rows_dtype": "half"}, "rows_dtype='half' .*'float32', 'bfloat16'"),
        ({"combiner": "max"}, "combiner 'max'"),
        ({"embeddings_initializer": keras.initializers.Orthogonal()}, "Orthogonal"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises((UsageError, ModelFileError), match=message):
        Embedding(**{"output_dim": 3, **wrong})


def test_settings_of_the_table_are_in_the_config_of_the_layer():
    given = {"min_count": 3, "max_age": 10, "learning_rate_multiplier": 0.5, "max_rows": 7, "rows_dtype": "bfloat16"}
    again = Embedding.from_config(Embedding(3, **given).get_config())
    assert again.table_spec().options == TableOptions(**given)
    assert again.get_config() == json.loads(json.dumps(Embedding(3, name=again.name, **given).get_config()))
    assert (again.dtype, type(again.get_config()["rows_dtype"])) == ("float32", str)
