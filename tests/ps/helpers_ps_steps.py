"""Steps of training, on servers and in one process, and what must be the same after them."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

from elasticcb.optimizers.held_state import read_optimizers
from elasticcb.sharding.partition import pack
from elasticcb.sharding.push import Gradients


def push_step(client, dense, rows=None, learning_rate=None):
    """A push of one step's gradients, on the newest weights."""
    client.pull()
    blocks = [
        pack(dense, client.servers.specs, slices, True, {part.variable for part in slices} & set(dense))
        for slices in client.servers.partition
    ]
    return client.push(
        Gradients(blocks, tuple(sorted(dense)), rows or {}, [{} for _ in blocks], [{} for _ in blocks], 1.0),
        learning_rate,
    )


def make_variables(specs, values):
    made = []
    for spec, value in zip(specs, values, strict=True):
        variable = keras.Variable(value, dtype=spec.dtype, trainable=spec.trainable, name=spec.path.rpartition("/")[2])
        variable._path = spec.path
        if spec.constraint:
            variable.constraint = keras.saving.deserialize_keras_object(json.loads(spec.constraint))
        made.append(variable)
    return made


def in_one_process(made, specs, values, steps):
    """The weights, and the state of the optimizers, after Keras itself has applied `steps`."""
    variables = make_variables(specs, values)
    groups = [
        [i for i, spec in enumerate(specs) if spec.trainable and spec.optimizer == place] for place in range(len(made))
    ]
    for optimizer, group in zip(made, groups, strict=True):
        optimizer.build([variables[i] for i in group])

    @tf.function
    def apply(given):
        for optimizer, group in zip(made, groups, strict=True):
            own = [i for i in group if i in given]
            if own:
                optimizer.apply([given[i] for i in own], [variables[i] for i in own])

    for dense in steps:
        apply({index: tf.constant(gradient) for index, gradient in dense.items()})
    return [variable.numpy() for variable in variables], read_optimizers(made, variables)


def assert_close(mine, other, tolerance=1e-6):
    for one, two in zip(mine, other, strict=True):
        assert one.dtype == two.dtype
        scale = max(float(np.abs(two.astype(np.float64)).max()), 1.0) if two.size else 1.0
        np.testing.assert_allclose(one.astype(np.float64), two.astype(np.float64), rtol=0, atol=tolerance * scale)


def assert_same_state(mine, other, tolerance=1e-5):
    assert mine.optimizers == other.optimizers
    for one, two in ((mine.slots, other.slots), (mine.extras, other.extras), (mine.shared, other.shared)):
        assert one.keys() == two.keys()
        assert_close(one.values(), [two[key] for key in one], tolerance)
