"""`carry.Graph`: a reader uses the objects of an earlier graph again where only variables differ."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.serialization import carry
from elasticcb.serialization.reducers import Hollow


class Scaled(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.counts = 1.0, keras.Variable([0.0, 0.0]), tf.Variable([0, 0])


def sent(layer, others=None):
    second = {"shared": layer.shift, "more": others}
    return carry.dumps_graph({"layer": layer}, second, {"layer": layer}, Hollow(), None)[0]


def test_same_objects_with_new_values_of_their_variables():
    layer = Scaled()
    first = carry.Graph(sent(layer))
    layer.shift.assign([1.0, 2.0])
    second = carry.Graph(sent(layer, [keras.Variable(3.0)]), before=first)
    assert second.continues
    assert second.parts["layer"] is first.parts["layer"]
    assert second.others["shared"] is second.parts["layer"].shift
    np.testing.assert_array_equal(second.parts["layer"].shift.numpy(), [1.0, 2.0])
    assert float(second.others["more"][0]) == 3.0
    third = carry.Graph(sent(layer), before=second)
    assert third.continues
    assert third.others["shared"] is third.parts["layer"].shift


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "scale", 2.0),
        lambda layer: setattr(layer, "shift", keras.Variable([0.0, 0.0, 0.0])),
        lambda layer: setattr(layer, "trainable", False),
        lambda layer: setattr(layer, "counts", tf.Variable([0, 0, 0])),
    ],
)
def test_changed_object_is_read_again(change):
    layer = Scaled()
    first = carry.Graph(sent(layer))
    change(layer)
    second = carry.Graph(sent(layer), before=first)
    assert not second.continues
    assert second.parts["layer"] is not first.parts["layer"]


def test_state_that_is_in_no_variable_is_read_again():
    layer = Scaled()
    layer.table = tf.lookup.experimental.MutableHashTable("int64", "int64", 0)
    first = carry.Graph(sent(layer))
    assert not first.is_steady
    assert not carry.Graph(sent(layer), before=first).continues
