"""Every optimizer, on several servers, does what it does in one process."""

from __future__ import annotations

import inspect
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers_ps_steps import assert_close, assert_same_state, in_one_process, push_step

from deep_cases import deep_but
from elasticcb.errors import ModelFileError
from elasticcb.master.initial_model import InitialModel
from elasticcb.model.weights import variable_specs
from elasticcb.optimizers.traits import may_split
from elasticcb.rpc.tensors import dtype_of
from elasticcb.sharding.flat_blocks import unpack_weights
from elasticcb.sharding.partition import VariableSpec
from helpers_ps import gradients, initial_values

pytestmark = pytest.mark.usefixtures("early_xla")
optimizers = keras.optimizers

SPECS = (
    VariableSpec("model/embedding/embeddings", (40, 16), "float32", True),
    VariableSpec("model/hidden/kernel", (300, 64), "float32", True),
    VariableSpec("model/hidden/bias", (64,), "float32", True),
    VariableSpec("model/norm/moving_mean", (64,), "float32", False),
    VariableSpec("model/head/kernel", (64, 2), "float32", True),
    VariableSpec("model/head/scale", (), "float32", True),
)
CLASSES = sorted(
    name
    for name, value in vars(optimizers).items()
    if inspect.isclass(value) and issubclass(value, optimizers.Optimizer) and value is not optimizers.Optimizer
)


def make(name, **settings):
    if name == "LossScaleOptimizer":
        # The worker gives unscaled gradients to the servers; so does this scale.
        return optimizers.LossScaleOptimizer(optimizers.Adam(0.01, **settings), initial_scale=1.0)
    if name == "MultiOptimizer":
        inner = {".*/kernel": optimizers.Adam(0.01, **settings), "never": optimizers.Lion()}
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Nadam(0.01, **settings), inner))
    return getattr(optimizers, name)(0.01, **settings)


VARIANTS = {
    **{name: lambda name=name: make(name) for name in CLASSES},
    "SGD with Nesterov momentum": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "RMSprop, centered": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adam with amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "Adam with a schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)),
    "Adam with clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.5),
    "SGD with clipvalue": lambda: optimizers.SGD(0.01, clipvalue=0.5),
    "SGD with weight decay": lambda: optimizers.SGD(0.01, weight_decay=0.1),
    "Muon but for a layer": lambda: optimizers.Muon(0.01, exclude_layers=["head"]),
    "Muon on embeddings too": lambda: optimizers.Muon(0.01, exclude_embeddings=False),
    "Adam with EMA that overwrites": lambda: optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "Nadam that accumulates": lambda: optimizers.Nadam(0.01, gradient_accumulation_steps=2),
    "Adafactor that accumulates, with EMA": lambda: optimizers.Adafactor(
        0.01, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3
    ),
    "Lamb with clipnorm": lambda: optimizers.Lamb(0.01, clipnorm=0.5),
}


KEPT = ("Adafactor", "MultiOptimizer", "Muon but for a layer", "Adam with EMA that overwrites")


@pytest.mark.parametrize("name", deep_but(VARIANTS, *KEPT))
def test_five_updates_on_two_servers_equal_keras_in_one_process(start, name):
    make_it, values = VARIANTS[name], initial_values(SPECS)
    client = start(lambda count: [make_it()], SPECS)
    client.initialize(InitialModel(values))
    if may_split(make_it()):
        assert any(len(p) < 5 for p in client.servers.partition)
    steps = [gradients(number, SPECS) for number in range(5)]
    for dense in steps:
        push_step(client, dense)
    weights, state = in_one_process([make_it()], SPECS, values, steps)
    assert_close(unpack_weights(client.pull(), SPECS, client.servers.partition), weights)
    assert_same_state(client.export().optimizer, state)


HALF = {
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "float64": 1e-12,
}


@pytest.mark.parametrize("dtype", deep_but(HALF, "bfloat16"))
@pytest.mark.parametrize("name", deep_but(["Adam", "Adafactor", "Nadam"], "Adam"))
def test_variables_of_any_floating_dtype_are_updated(start, name, dtype):
    specs = [replace(spec, dtype=dtype) for spec in SPECS]
    values = initial_values(specs)
    client = start(lambda count: [make(name)], specs)
    client.initialize(InitialModel(values))
    steps = [gradients(number, specs) for number in range(2)]
    for dense in steps:
        push_step(client, dense)
    weights, _ = in_one_process([make(name)], specs, values, steps)
    found = unpack_weights(client.pull(), specs, client.servers.partition)
    assert {array.dtype for array in found} == {dtype_of(dtype)}
    assert_close(found, weights, HALF[dtype])


@pytest.mark.parametrize("make_it", [lambda: optimizers.AdamW(0.1, weight_decay=0.1), lambda: optimizers.Muon(0.1)])
@pytest.mark.parametrize("names", deep_but([["bias"], ["hidden"], ["^kernel"], None], ["hidden"], None))
def test_what_weight_decay_leaves_out_is_left_out_on_the_servers(start, make_it, names):
    inputs = [keras.Input((8,)), keras.layers.Dense(4, name="hidden"), keras.layers.Dense(1)]
    model = keras.Sequential(inputs)
    there = keras.models.clone_model(model)
    there.set_weights(model.get_weights())

    def make_optimizer(of):
        optimizer = make_it()
        if names:
            optimizer.exclude_from_weight_decay(var_names=names)
        else:
            optimizer.exclude_from_weight_decay(var_list=of.trainable_variables[2:])
        return optimizer

    model.compile(make_optimizer(model), "mse")
    client = start(lambda count: [make_it()], variable_specs(model))
    client.initialize(InitialModel(model.get_weights()))
    steps = [gradients(number, client.servers.specs) for number in range(2)]
    for dense in steps:
        push_step(client, dense)
    optimizer = make_optimizer(there)
    for dense in steps:
        optimizer.apply([tf.constant(gradient) for gradient in dense.values()], there.trainable_variables)
    assert_close(unpack_weights(client.pull(), client.servers.specs, client.servers.partition), there.get_weights())


class Broken(optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        raise ValueError("no idea what to do")


@pytest.mark.parametrize("use_async", [True, False])
def test_the_error_of_an_optimizer_reaches_the_worker_with_the_users_traceback(start, use_async):
    client = start(lambda count: [Broken(0.1)], SPECS, use_async=use_async)
    client.initialize(InitialModel(initial_values(SPECS)))
    with pytest.raises(ModelFileError, match=r"Broken failed on a parameter server.*no idea what to do") as caught:
        push_step(client, gradients(0, SPECS))
    assert 'raise ValueError("no idea what to do")' in caught.value.user_traceback
    assert "elasticcb/ps/" not in caught.value.user_traceback


class Unbuildable(optimizers.SGD):
    def build(self, variables):
        raise ValueError("no room")


def test_the_error_of_an_optimizer_that_can_not_be_built_reaches_the_master(start):
    client = start(lambda count: [Unbuildable(0.1)], SPECS)
    with pytest.raises(ModelFileError, match=r"Unbuildable can't be built.*no room") as caught:
        client.initialize(InitialModel(initial_values(SPECS)))
    assert 'raise ValueError("no room")' in caught.value.user_traceback


class Rounded(keras.constraints.Constraint):
    """A user's own, that is not registered."""

    def __call__(self, w):
        return tf.round(w)


@keras.saving.register_keras_serializable("elasticcb_tests")
class Capped(keras.constraints.Constraint):
    def __init__(self, largest):
        self.largest = largest

    def __call__(self, w):
        return tf.minimum(w, self.largest)

    def get_config(self):
        return {"largest": self.largest}


def shifted(w):
    return w + 1.0


@pytest.mark.parametrize(
    "constraint",
    [keras.constraints.MaxNorm(0.5), keras.constraints.UnitNorm(), Rounded(), Capped(0.25), shifted, lambda w: w * 0.5],
    ids=["MaxNorm", "UnitNorm", "unregistered class", "registered class", "function", "lambda"],
)
def test_constraints_are_applied_on_the_servers(start, constraint, monkeypatch):
    # Found like this, classes and functions need not be registered.
    for found in (Rounded, shifted):
        monkeypatch.setitem(keras.saving.get_custom_objects(), found.__name__, found)
    layer = keras.layers.Dense(64, kernel_constraint=constraint)
    model = keras.Sequential([keras.Input((300,)), layer])
    model.compile("sgd", "mse")
    specs = variable_specs(model)
    client = start(lambda count: [optimizers.SGD(0.1)], specs)
    client.initialize(InitialModel(model.get_weights()))
    push_step(client, gradients(0, specs))
    stepped = model.get_weights()[0] - 0.1 * gradients(0, specs)[0]
    expected = np.asarray(layer.kernel.constraint(tf.constant(stepped)))
    np.testing.assert_allclose(
        unpack_weights(client.pull(), specs, client.servers.partition)[0], expected, rtol=1e-5, atol=1e-5
    )


def test_a_constraint_that_can_not_be_made_on_a_server_is_an_error_that_says_what_to_do(start):
    specs = [replace(SPECS[0], constraint='{"class_name": "Nowhere", "config": {}, "module": "nowhere"}')]
    client = start(lambda count: [optimizers.SGD(0.1)], specs)
    with pytest.raises(
        ModelFileError, match=r"constraint of 'model/embedding/embeddings' can't be created .* Register"
    ):
        client.initialize(InitialModel(initial_values(specs)))
