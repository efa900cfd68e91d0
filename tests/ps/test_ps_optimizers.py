"""Every optimizer, on several servers, does what it does in one process."""

from __future__ import annotations

import contextlib
import inspect
import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.errors import ModelFileError
from elasticcb.optimizer_state import read_optimizers
from elasticcb.optimizer_traits import may_split
from elasticcb.ps.partition import VariableSpec, pack
from elasticcb.ps.server import PSServer
from elasticcb.ps_client import PSClient, Push, unpack_weights
from elasticcb.settings import Command, JobSettings, ModelSettings, TrainingSettings
from elasticcb.tensors import dtype_of
from helpers_ps import gradients, initial_values

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


def excluding(var_names):
    def make_it():
        optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(var_names=var_names)
        return optimizer

    return make_it


VARIANTS = {
    **{name: lambda name=name: make(name) for name in CLASSES},
    "SGD with Nesterov momentum": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "RMSprop, centered": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adam with amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "Adam with a schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)),
    "Adam with clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.5),
    "SGD with clipvalue": lambda: optimizers.SGD(0.01, clipvalue=0.5),
    "SGD with weight decay": lambda: optimizers.SGD(0.01, weight_decay=0.1),
    "AdamW without decay of biases": excluding(["bias"]),
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


@pytest.fixture
def start():
    """Starts servers with the optimizers that a function makes; gives a client of all."""
    with contextlib.ExitStack() as stack:

        def servers(make_optimizers, specs=SPECS, num_ps=2, split=None, **training):
            settings = JobSettings(
                command=Command.TRAIN,
                name="test",
                directory="",
                model=ModelSettings(zoo="", definition=""),
                training=TrainingSettings(**training),
            )
            addresses = []
            for _ in range(num_ps):
                server = PSServer(settings, make_optimizers)
                stack.callback(server.stop, 0)
                server.start()
                addresses.append(server.address)
            if split is None:
                split = all(map(may_split, make_optimizers(9)))
            client = PSClient(addresses, specs, split, 1, not training.get("use_async", True), 5.0)
            stack.callback(client.close)
            return client

        yield servers


def step(client, dense, rows=None):
    client.pull()
    blocks = [
        pack(dense, client.specs, slices, True, {part.variable for part in slices} & set(dense))
        for slices in client.partition
    ]
    return client.push(Push(blocks, tuple(sorted(dense)), rows or {}, [{} for _ in blocks], 1.0), None)


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


@pytest.mark.parametrize("name", VARIANTS)
def test_five_updates_on_two_servers_equal_keras_in_one_process(start, name):
    make_it, values = VARIANTS[name], initial_values(SPECS)
    client = start(lambda count: [make_it()])
    client.initialize(values)
    if may_split(make_it()):
        assert any(len(p) < 5 for p in client.partition)
    steps = [gradients(number, SPECS) for number in range(5)]
    for dense in steps:
        step(client, dense)
    weights, state = in_one_process([make_it()], SPECS, values, steps)
    assert_close(unpack_weights(client.pull(), SPECS, client.partition), weights)
    assert_same_state(client.export().optimizer, state)


HALF = {
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "float64": 1e-12,
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", CLASSES)
def test_variables_of_any_floating_dtype_are_updated(start, name, dtype):
    specs = [replace(spec, dtype=dtype) for spec in SPECS]
    values = initial_values(specs)
    client = start(lambda count: [make(name)], specs)
    client.initialize(values)
    steps = [gradients(number, specs) for number in range(2)]
    for dense in steps:
        step(client, dense)
    weights, _ = in_one_process([make(name)], specs, values, steps)
    found = unpack_weights(client.pull(), specs, client.partition)
    assert {array.dtype for array in found} == {dtype_of(dtype)}
    assert_close(found, weights, HALF[dtype])


class Broken(optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        raise ValueError("no idea what to do")


@pytest.mark.parametrize("use_async", [True, False])
def test_the_error_of_an_optimizer_reaches_the_worker_with_the_users_traceback(start, use_async):
    client = start(lambda count: [Broken(0.1)], use_async=use_async)
    client.initialize(initial_values(SPECS))
    with pytest.raises(ModelFileError, match=r"Broken failed on a parameter server.*no idea what to do") as caught:
        step(client, gradients(0, SPECS))
    assert 'raise ValueError("no idea what to do")' in caught.value.user_traceback
    assert "elasticcb/ps/" not in caught.value.user_traceback


class Unbuildable(optimizers.SGD):
    def build(self, variables):
        raise ValueError("no room")


def test_the_error_of_an_optimizer_that_can_not_be_built_reaches_the_master(start):
    client = start(lambda count: [Unbuildable(0.1)])
    with pytest.raises(ModelFileError, match=r"Unbuildable can't be built.*no room") as caught:
        client.initialize(initial_values(SPECS))
    assert 'raise ValueError("no room")' in caught.value.user_traceback
