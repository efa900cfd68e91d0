"""Between the optimizers of a model in one process and their state as it travels."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from deep_cases import deep_but
from elasticcb.errors import ElasticCBError
from elasticcb.optimizers import RowWiseAdagrad
from elasticcb.optimizers.held_state import read_optimizers, write_optimizers
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.traits import unwrapped
from elasticcb.sharding.partition import VariableSpec

optimizers = keras.optimizers

# All classes of Keras that update something.
CLASSES = sorted(
    name
    for name, value in vars(optimizers).items()
    if inspect.isclass(value) and issubclass(value, optimizers.Optimizer) and value is not optimizers.Optimizer
)
OWN = ["RowWiseAdagrad", "Unlisted"]
AVERAGED = {"use_ema": True, "gradient_accumulation_steps": 2}


class Unlisted(optimizers.Optimizer):
    """A user's own, that keeps what it learns in a dict, and something of its own of another shape."""

    def build(self, variables):
        super().build(variables)
        self.memory = {v.path: self.add_variable_from_reference(v, name="memory") for v in variables}
        self.norms = {v.path: self.add_variable((), name="norm") for v in variables}
        self.total = self.add_variable((), name="total")

    def update_step(self, gradient, variable, learning_rate):
        path = self._trainable_variables[self._get_variable_index(variable)].path
        memory = self.memory[path]
        self.assign_add(memory, gradient)
        self.assign(self.norms[path], tf.norm(gradient))
        self.assign_add(self.total, tf.norm(gradient))
        self.assign_sub(variable, learning_rate * memory)


def make(name, **settings):
    if name == "Unlisted":
        return Unlisted(learning_rate=0.1, **settings)
    if name == "RowWiseAdagrad":
        return RowWiseAdagrad(**settings)
    if name == "LossScaleOptimizer":
        return optimizers.LossScaleOptimizer(optimizers.Adam(**settings))
    if name == "MultiOptimizer":
        inner = {".*/kernel": optimizers.Adam(**settings), "never": optimizers.Lion()}
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Nadam(**settings), inner))
    return getattr(optimizers, name)(**settings)


def make_model():
    layers = [keras.Input((3,)), keras.layers.Embedding(5, 4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    return keras.Sequential(layers)


def train(optimizer, model, first=0, steps=3):
    # Each step has the same gradients, whoever makes it.
    for step in range(first, first + steps):
        generator = np.random.default_rng(step)
        gradients = [tf.constant(generator.normal(size=v.shape), v.dtype) for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)


def assert_same_variables(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy(), err_msg=mine.path)


@pytest.mark.parametrize("settings", [{}, AVERAGED], ids=["plain", "averaged"])
@pytest.mark.parametrize("name", deep_but([*CLASSES, *OWN], "Adam", "MultiOptimizer", *OWN))
def test_training_goes_on_with_the_state_of_any_optimizer(name, settings):
    model, other = make_model(), make_model()
    first, second = make(name, **settings), make(name, **settings)
    train(first, model)
    state = read_optimizers([first], model.weights)
    other.set_weights(model.get_weights())
    write_optimizers(state, [second], other.weights)
    assert int(second.iterations) == int(first.iterations) > 0
    # The scale of the loss is a worker's own.
    assert_same_variables(unwrapped(second).variables, unwrapped(first).variables)
    for optimizer, trained in ((first, model), (second, other)):
        train(optimizer, trained, first=3)
    if name != "LossScaleOptimizer":
        assert_same_variables(other.trainable_variables, model.trainable_variables)


def test_classes_of_keras_are_all_here():
    assert len(CLASSES) >= 16


def test_names_tell_what_a_variable_of_the_optimizer_belongs_to():
    model = make_model()
    state = read_optimizers([make("Adafactor", **AVERAGED)], model.weights)
    assert state.optimizers == ("Adafactor",)
    kernel = next(i for i, v in enumerate(model.weights) if v.path.endswith("kernel"))
    assert {name for index, name in state.slots if index == kernel} == {
        "v", "model_variables_moving_average", "accumulated_gradients",
    }  # fmt: skip
    assert state.extras[kernel, "r"].shape == (4,)
    assert state.extras[kernel, "c"].shape == (2,)
    assert set(state.shared) == {"iterations", "learning_rate"}
    assert "u_product" in read_optimizers([optimizers.Nadam()], model.weights).shared


def test_an_optimizer_inside_another_is_named_by_its_place():
    model = make_model()
    state = read_optimizers([make("MultiOptimizer")], model.weights)
    assert state.optimizers == ("0.0/Adam", "0.2/Nadam")
    assert {"0.0/iterations", "0.2/u_product"} <= set(state.shared)


def two_optimizers():
    return [optimizers.Adam(0.01), optimizers.SGD(0.1, momentum=0.9)]


def test_two_optimizers_of_one_model_keep_apart():
    model, other = make_model(), make_model()
    owners = [-1 if not variable.trainable else 0 if "batch" in variable.path else 1 for variable in model.weights]
    owners[-1] = -1  # as for the average of another variable, which a step assigns
    pair = two_optimizers()
    for place, optimizer in enumerate(pair):
        mine = [v for v, owner in zip(model.weights, owners, strict=True) if owner == place]
        optimizer.apply([tf.ones(v.shape) for v in mine], mine)
    pair[1].apply([tf.ones(v.shape) for v in mine], mine)
    specs = [
        VariableSpec(variable.path, tuple(variable.shape), "float32", owner >= 0, optimizer=owner)
        for variable, owner in zip(model.weights, owners, strict=True)
    ]
    unused = optimizers.Nadam()  # of a part that was trained before
    unused.build(model.trainable_variables)
    state = read_optimizers([*pair, unused], model.weights, specs)
    assert state.optimizers == ("Adam", "1/SGD")
    assert (state.shared["iterations"], state.shared["1/iterations"]) == (1, 2)
    same = two_optimizers()
    write_optimizers(state, [*same, unused], other.weights, specs)
    for mine, theirs in zip(pair, same, strict=True):
        assert_same_variables(theirs.variables, mine.variables)


def test_several_optimizers_that_are_not_built_are_left_out_where_their_variables_are_not_known():
    assert read_optimizers(two_optimizers(), make_model().weights) == OptimizerState()


def test_a_frozen_layer_keeps_what_the_optimizer_knew_of_it():
    model = make_model()
    optimizer = optimizers.Adam()
    train(optimizer, model)
    model.layers[0].trainable = False
    state = read_optimizers([optimizer], model.weights)
    assert (0, "momentums") not in state.slots
    remembered = optimizer._momentums[0].numpy()
    write_optimizers(state, [optimizer], model.weights)
    np.testing.assert_array_equal(optimizer._momentums[0].numpy(), remembered)


def test_a_variable_that_a_built_optimizer_does_not_know_is_named():
    model = make_model()
    model.layers[0].trainable = False
    optimizer = optimizers.Adam()
    train(optimizer, model)
    model.layers[0].trainable = True
    with pytest.raises(ElasticCBError, match=r"without '.*/embeddings'.*compile the model again"):
        read_optimizers([optimizer], model.weights)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (optimizers.SGD(momentum=0.9), "state of Adam does not match the model's optimizer SGD"),
        (optimizers.AdamW(), "state of Adam does not match the model's optimizer AdamW"),
        (optimizers.Adam(amsgrad=True), "no velocity_hats of"),
        (optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 10)), "learning_rate that the optimizer lacks"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(target, message):
    model = make_model()
    state = read_optimizers([optimizers.Adam()], model.weights)
    with pytest.raises(ElasticCBError, match=message):
        write_optimizers(state, [target], model.weights)


def test_the_state_of_another_model_is_refused_and_nothing_is_changed():
    optimizer, model = optimizers.Adam(), make_model()
    train(optimizer, model)
    state = read_optimizers([optimizer], model.weights)
    state.slots[0, "velocities"] = state.slots[0, "velocities"][:3]
    state.shared["iterations"] = np.array(100)
    with pytest.raises(ElasticCBError, match=r"velocities of '.*embeddings' of the shape \[3, 4\] instead of \[5, 4\]"):
        write_optimizers(state, [optimizer], model.weights)
    assert int(optimizer.iterations) == 3


def test_what_a_users_optimizer_keeps_in_dicts_is_found():
    model = make_model()
    state = read_optimizers([make("Unlisted")], model.weights)
    trained = {index for index, variable in enumerate(model.weights) if variable.trainable}
    assert set(state.slots) == {(index, "memory") for index in trained}
    assert set(state.extras) == {(index, "norms") for index in trained}
    assert set(state.shared) == {"iterations", "learning_rate", "total"}
