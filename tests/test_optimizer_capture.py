"""What a train_step gives to its optimizers, and what servers can't do with it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.compute.tensorflow.capture import step_variables
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


def give(optimizer, layer, of=0):
    def step(model, tape, loss):
        chosen = model_optimizers(model)[optimizer]
        weights = getattr(model, layer).weights if isinstance(layer, str) else layer(model)
        chosen.apply(tape.gradient(loss, weights), weights)

    return step


def both(*steps):
    return lambda *given: [step(*given) for step in steps]


def test_optimizers_are_found_in_attributes_with_the_compiled_one_first():
    assert [optimizer.name for optimizer in model_optimizers(Model(None))] == ["main", "early", "late"]


def test_each_variable_belongs_to_the_optimizer_that_was_given_its_gradient():
    model = Model(both(give(1, "first"), give(2, "second")))
    assert step_variables(model, BATCH).updated == {0: 1, 1: 1, 2: 2, 3: 2}
    assert model.early[0].apply.__func__ is keras.optimizers.Optimizer.apply


def test_tracing_changes_nothing_even_where_the_step_runs_eagerly():
    model = Model(lambda model, tape, loss: both(give(0, "first"), lambda *_: model.second.bias.assign([9.0]))(
        model, tape, loss
    ))  # fmt: skip
    model.run_eagerly = True
    assert step_variables(model, BATCH).updated == {0: 0, 1: 0}
    assert model.second.bias.numpy() == [0.0]


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
        (both(), "gave the optimizer no gradients"),
        (give(0, lambda model: [model.stray]), "which is not a weight of the model"),
        (apply_in_a_branch, "applied inside a tf.cond"),
        (lambda model, tape, loss: model.optimizer.apply([loss], model.first.weights), "1 gradients for 2 variables"),
    ],
    ids=["twice", "by_two", "none", "stray", "in_a_branch", "missing"],
)  # fmt: skip
def test_what_servers_cannot_apply_is_explained(step, message):
    with pytest.raises(ModelFileError, match=message):
        step_variables(Model(step), BATCH)


def fitted(model, layer, x):
    """The mean of a layer's outputs, squared."""
    return keras.ops.mean(getattr(model, layer)(x) ** 2)


def dcgan(model, tape, loss):
    """Updates the discriminator, then computes the generator's loss through it, as Keras's examples do."""
    give(1, "second")(model, tape, loss)
    with tf.GradientTape() as late:
        fooled = keras.ops.mean(model.second(model.first(tf.constant(BATCH[0]))))
    weights = model.first.weights
    model.optimizer.apply(late.gradient(fooled, weights), weights)


def mean_teacher(model, tape, loss):
    """The second layer follows the first one's updated weights."""
    give(0, "first")(model, tape, loss)
    model.second.bias.assign(0.9 * model.second.bias + 0.1 * keras.ops.mean(model.first.bias))


def moco(model, tape, loss):
    """Keys are computed by the updated encoder after the step."""
    give(0, "first")(model, tape, loss)
    model.stray.assign(tf.reduce_mean(model.first(tf.constant(BATCH[0]))))


def in_a_function(model, tape, loss):
    give(0, "first")(model, tape, loss)
    tf.function(lambda x: model.first(x))(tf.constant(BATCH[0]))


def in_a_condition(model, tape, loss):
    give(0, "first")(model, tape, loss)
    tf.cond(tf.reduce_mean(loss) > 0, lambda: fitted(model, "first", tf.constant(BATCH[0])), lambda: 0.0)


LATE = [
    (dcgan, r"reads 'second/kernel' \(and 1 more variable\) after giving its gradient to the optimizer 'early'"),
    (mean_teacher, r"reads 'first/bias' after giving its gradient to the optimizer 'main'"),
    (moco, r"reads 'first/kernel'.*Compute all losses before.*Cluster\.place"),
    (in_a_function, "reads 'first/"),
]


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(("step", "message"), LATE, ids=[step.__name__ for step, _ in LATE])
def test_step_that_reads_a_variable_after_its_update_is_refused(step, message, run_eagerly):
    model = Model(step)
    model.first.name, model.second.name = "first", "second"
    for layer in (model.first, model.second):
        for weight in layer.weights:
            weight._path = f"{layer.name}/{weight.name}"
    model.run_eagerly = run_eagerly
    with pytest.raises(ModelFileError, match=message):
        step_variables(model, BATCH)


def test_read_inside_a_condition_after_the_update_is_refused():
    with pytest.raises(ModelFileError, match="after giving its gradient to the optimizer 'main'"):
        step_variables(Model(in_a_condition), BATCH)


class Recurrent(Model):
    """With loops and lookups, whose gradients hand variables on."""

    def __init__(self, step):
        super().__init__(step)
        self.rows, self.cells = keras.layers.Embedding(5, 3), keras.layers.LSTM(4)
        self.norm = keras.layers.BatchNormalization()
        self.tracker = keras.metrics.Mean(name="seen")
        self.build_all()

    def build_all(self):
        self.rows.build((None,))
        self.cells.build((None, 2, 3))
        self.norm.build((None, 4))
        self.rows.embeddings.regularizer = keras.regularizers.L2(0.1)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            found = self.norm(self.cells(self.rows(tf.cast(x, tf.int32)[:, :2])), training=True)
            again = tf.cond(
                tf.reduce_mean(x) > 0, lambda: self.first(x + tf.gather(self.rows.embeddings, [1])), lambda: found
            )
            loss = keras.ops.mean((self.second(found + again) - y) ** 2) + sum(self.losses)
        self.step(self, tape, loss)
        self.tracker.update_state(loss)
        return {"loss": loss, "seen": self.tracker.result()}


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2, weight_decay=0.1, clipnorm=1.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9)),
    ],
)
def test_step_that_computes_all_losses_first_may_give_gradients_one_after_another(run_eagerly, optimizer):
    steps = both(give(1, "second"), give(0, "cells"), give(2, "first"), give(1, "rows"))
    model = Recurrent(steps)
    model.compile(optimizer, run_eagerly=run_eagerly)
    assert len(step_variables(model, BATCH).updated) == 8
