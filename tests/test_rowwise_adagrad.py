from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.errors import UsageError
from elasticcb.optimizers import RowWiseAdagrad
from elasticcb.optimizers.traits import may_join, may_serve_rows, may_split, may_update_rows


def applied(optimizer, initial, gradients, jit_compile=None):
    """A variable after updates by `gradients`, compiled by XLA where that is said."""
    variable = keras.Variable(initial, name="rows")
    optimizer.build([variable])

    def apply(gradient):
        optimizer.apply([gradient], [variable])

    if jit_compile is not None:
        apply = tf.function(apply, jit_compile=jit_compile)
    for gradient in gradients:
        apply(gradient)
    return variable.numpy()


def arrays(shape, count=4):
    return list(np.random.default_rng(0).standard_normal((count, *shape)).astype("float32"))


@pytest.mark.parametrize("shape", [(7, 5), (4, 3, 2)])
def test_rows_are_updated_by_the_formula_of_fbgemm(shape):
    initial, *gradients = arrays(shape)
    optimizer = RowWiseAdagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-3)
    rows, sums = initial.astype("float64"), np.zeros(shape[0])
    for gradient in gradients:
        for row in range(shape[0]):
            sums[row] += (gradient[row].astype("float64") ** 2).sum() / gradient[row].size
            rows[row] -= 0.1 * gradient[row] / (np.sqrt(sums[row]) + 1e-3)
    np.testing.assert_allclose(applied(optimizer, initial, gradients), rows, rtol=1e-5)
    assert optimizer._accumulators[0].shape == (shape[0], *(1 for _ in shape[1:]))


@pytest.mark.parametrize("shape", [(), (6,), (6, 1)])
def test_elements_that_are_rows_are_updated_as_by_adagrad(shape):
    initial, *gradients = arrays(shape)
    expected = applied(keras.optimizers.Adagrad(0.1), initial, gradients)
    np.testing.assert_allclose(applied(RowWiseAdagrad(0.1), initial, gradients), expected, rtol=1e-5)


@pytest.mark.parametrize("jit_compile", [None, False, True], ids=["eager", "graph", "XLA"])
def test_gradients_of_rows_are_added_up_and_do_what_dense_ones_do(jit_compile):
    initial = arrays((9, 3), 1)[0]
    rows = [np.array([4, 8, 4, 0, 4]), np.array([2, 2, 2, 2, 2]), np.array([7, 6, 5, 4, 3])]
    values = arrays((5, 3), 3)
    sparse = [tf.IndexedSlices(*map(tf.constant, (v, r, (9, 3)))) for r, v in zip(rows, values, strict=True)]
    dense = [tf.convert_to_tensor(each) for each in sparse]
    expected = applied(RowWiseAdagrad(0.1), initial, dense)
    found = applied(RowWiseAdagrad(0.1), initial, sparse, jit_compile)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(found[1], initial[1])


@pytest.mark.parametrize("dense", [False, True])
def test_without_an_epsilon_rows_without_a_gradient_do_not_change(dense):
    initial = np.ones((3, 2), "float32")
    gradient = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 1]), tf.constant([3, 2]))
    optimizer = RowWiseAdagrad(0.5, initial_accumulator_value=0.0, epsilon=0.0)
    found = applied(optimizer, initial, [tf.convert_to_tensor(gradient) if dense else gradient])
    np.testing.assert_array_equal(found, [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0]])


def test_model_that_plain_keras_trains_is_saved_and_loaded_with_it(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(RowWiseAdagrad(0.1, 0.2, epsilon=1e-3, weight_decay=0.01), "mse", jit_compile=True)
    x, y = np.arange(40).reshape(20, 2) % 20, np.ones(20, "float32")
    first, *_, last = model.fit(x, y, epochs=5, verbose=0).history["loss"]
    assert last < first
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for each in (model, loaded):
        each.fit(x, y, epochs=2, verbose=0, shuffle=False)
    for mine, other in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7, err_msg=mine.path)


def test_optimizer_that_reduces_over_rows_may_be_cut_between_them_and_not_joined():
    class Own(RowWiseAdagrad):
        pass

    class Declared(RowWiseAdagrad):
        rowwise = True

    for optimizer in (RowWiseAdagrad(), Declared()):
        assert may_split(optimizer)
        assert may_update_rows(optimizer)
        assert may_serve_rows(optimizer, 2)
        assert not may_join(optimizer)
    assert not may_split(Own())
    assert not may_update_rows(Own())
    assert not may_split(RowWiseAdagrad(clipnorm=1.0))
    assert not may_serve_rows(RowWiseAdagrad(clipnorm=1.0), 2)
    assert may_serve_rows(RowWiseAdagrad(clipnorm=1.0), 1)
    assert not may_update_rows(RowWiseAdagrad(use_ema=True))


@pytest.mark.parametrize("argument", ["initial_accumulator_value", "epsilon"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "a"])
def test_what_is_no_number_from_0_on_is_refused_in_words(argument, value):
    with pytest.raises(UsageError, match=f"at least 0 as {argument}. Received: {value!r}"):
        RowWiseAdagrad(**{argument: value})
