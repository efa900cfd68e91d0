"""What a train_step gives to its optimizers, and what servers can't do with gradients of tables."""

from collections.abc import Mapping

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.compute.tensorflow.backend import TensorFlowCapture, step_variables
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import model_optimizers

BATCH = (np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))


class Model(keras.Model):
    """Two layers, two optimizers; `step(model, loss)` updates them."""

    def __init__(self, step):
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)
        self.others = {"late": keras.optimizers.SGD(name="late")}
        self.early = [keras.optimizers.Adam(name="early")]
        self.stray = tf.Variable(1.0)
        self.step = step
        self.first.build((None, 3))
        self.second.build((None, 4))
        self.compile(keras.optimizers.SGD(name="main"))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean((self.second(self.first(x)) - y) ** 2) * self.stray
        self.step(self, tape, loss)
        return {"loss": loss}


class OnDisk(Mapping):
    """Nobody reads all of it to look for something."""

    def __getitem__(self, key):
        raise AssertionError

    __iter__ = __len__ = __getitem__


def give(optimizer, layer, of=0):
    def step(model, tape, loss):
        chosen = model_optimizers(model)[optimizer]
        weights = getattr(model, layer).weights if isinstance(layer, str) else layer(model)
        chosen.apply(tape.gradient(loss, weights), weights)

    return step


def both(*steps):
    return lambda *given: [step(*given) for step in steps]


def test_optimizers_are_found_in_attributes_with_the_compiled_one_first():
    model = Model(None)
    model.records = OnDisk()
    assert [optimizer.name for optimizer in model_optimizers(model)] == ["main", "early", "late"]


def test_tracing_changes_nothing_even_where_the_step_runs_eagerly():
    model = Model(lambda model, tape, loss: both(give(0, "first"), lambda *_: model.second.bias.assign([9.0]))(
        model, tape, loss
    ))  # fmt: skip
    model.run_eagerly = True
    assert step_variables(model, BATCH, BATCH).updated == {0: 0, 1: 0}
    assert model.second.bias.numpy() == [0.0]


def test_each_variable_belongs_to_the_first_optimizer_that_was_given_its_gradient():
    steps = both(give(2, "first"), give(1, "first"), give(0, lambda model: [model.stray]))
    assert step_variables(Model(steps), BATCH, BATCH).updated == {0: 2, 1: 2}
    assert not step_variables(Model(both()), BATCH, BATCH).updated
    model = Model(both(give(1, "first"), give(2, "second")))
    assert step_variables(model, BATCH, BATCH).updated == {0: 1, 1: 1, 2: 2, 3: 2}
    assert model.early[0].apply.__func__ is keras.optimizers.Optimizer.apply


def test_gradients_without_variables_are_explained():
    step = lambda model, tape, loss: model.optimizer.apply([loss], model.first.weights)  # noqa: E731
    with pytest.raises(ModelFileError, match="1 gradients for 2 variables"):
        step_variables(Model(step), BATCH, BATCH)


def apply_in_a_branch(model, tape, loss):
    weights = model.first.weights
    gradients = tape.gradient(loss, weights)

    def update():
        model.optimizer.apply([2.0 * gradient for gradient in gradients], weights)
        return 0

    tf.cond(loss > 0, update, lambda: 0)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (both(give(1, "first"), give(1, "first")), "kernel' to the optimizer 'early' twice"),
        (both(give(1, "first"), give(2, "first")), "to two optimizers, 'early' and 'late'"),
        (apply_in_a_branch, "applied inside a tf.cond"),
    ],
    ids=["twice", "by_two", "in_a_branch"],
)  # fmt: skip
def test_what_servers_cannot_do_with_rows_of_a_table_is_explained(step, message):
    model = Model(step)
    for optimizer in model_optimizers(model):
        optimizer.build(model.trainable_variables)
    capture = TensorFlowCapture(model, [0])
    with pytest.raises(ModelFileError, match=message):
        tf.function(lambda: capture.train_step(BATCH)[1], autograph=False)()
