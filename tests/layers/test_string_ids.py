"""Strings as ids of an embedding layer."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.layers import Embedding
from elasticcb.layers.ids import integer_ids


def ids_of(strings, mask_zero=False):
    return integer_ids(tf.constant(strings), "words", None, mask_zero).numpy()


def test_a_string_has_the_same_id_for_ever():
    assert ids_of(["a", "user/7", "größe"]).tolist() == [
        12917804110809363939 % (2**63 - 2) + 1,  # FarmHash's Fingerprint64 of "a"
        tf.strings.to_hash_bucket_fast("user/7", 2**63 - 2).numpy() + 1,
        tf.strings.to_hash_bucket_fast("größe", 2**63 - 2).numpy() + 1,
    ]
    many = ids_of([f"word {number}" for number in range(100_000)])
    assert len(np.unique(many)) == len(many)
    assert many.min() > 0
    assert many.max() > 2**62


def test_the_empty_string_is_padding_only_with_mask_zero():
    assert ids_of(["", "a"], mask_zero=True).tolist() == [0, ids_of(["a"])[0]]
    assert ids_of([""])[0] > 0


@pytest.mark.parametrize("combiner", [None, "sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_strings_are_looked_up_as_their_ids(combiner, kind):
    lists = [["a", "b", "a"], ["", "c", "b"]] if kind == "dense" else [["a", "b", "a"], [], ["", "c"]]
    strings = tf.ragged.constant(lists, dtype=tf.string)
    numbers = tf.ragged.map_flat_values(lambda flat: integer_ids(flat, "words", None, True), strings)
    change = {"sparse": tf.RaggedTensor.to_sparse, "ragged": lambda x: x, "dense": tf.RaggedTensor.to_tensor}[kind]
    layer = Embedding(4, combiner=combiner, mask_zero=True, name="words")
    found, expected = layer(change(strings)), layer(change(numbers))
    if isinstance(found, tf.RaggedTensor):
        found, expected = found.to_tensor(), expected.to_tensor()
    np.testing.assert_array_equal(found, expected)


def test_model_of_strings_trains_and_is_saved(tmp_path):
    words = np.array([["red", "green"], ["blue", ""]])
    inputs = keras.Input((2,), dtype="string")
    table = Embedding(3, combiner="mean", mask_zero=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(table(inputs)))
    table.set_rows(ids_of(["red", "blue"]))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    before = table.rows()[1]
    model.fit(tf.constant(words), np.ones((2, 1)), epochs=3, verbose=0)
    assert (table.rows()[1] != before).any(1).all()
    model.save(tmp_path / "words.keras")
    again = keras.models.load_model(tmp_path / "words.keras")
    np.testing.assert_array_equal(again(tf.constant(words)), model(tf.constant(words)))


@pytest.mark.parametrize("given", [np.array([[3, 0]]), tf.constant([["a", ""]])], ids=["integers", "strings"])
def test_later_layers_leave_padding_out(given):
    inputs = keras.Input((2,), dtype=given.dtype.name)
    table = Embedding(3, mask_zero=True)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(table(inputs)))
    again = keras.Model.from_config(model.get_config())
    for each in (model, again):
        np.testing.assert_allclose(each(given), table(given)[:, 0], rtol=1e-6)
