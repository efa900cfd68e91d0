"""What a worker makes of one batch."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.compute.backend import HeldModel
from elasticcb.compute.registry import backend
from elasticcb.errors import ModelFileError
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.weights import variable_specs
from elasticcb.optimizers.variables import StepVariables
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import partition
from elasticcb.worker.trainer import train

X, Y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


class Trainer:
    """Runs batches of one model, on one thread and without embedding tables."""

    def __init__(self, model, metrics, specs, parts):
        self.computation = backend().computation(HeldModel(model, metrics, specs, parts))
        self._specs = specs

    def train(self, batch, blocks):
        return train(self.computation, self._specs, self.computation.prepare(batch, Mode.TRAINING), blocks, 0, {})

    def predict(self, batch):
        return self.computation.predict(self.computation.prepare(batch, Mode.PREDICTION), {})


def make_trainer(model, num_ps=1, step=None):
    """A trainer, and the weights as servers send them."""
    metrics = ModelMetrics(model, {})
    model.test_step((X, Y))
    specs = variable_specs(model, step)
    parts = partition(specs, num_ps, split=False)
    weights = [variable.numpy() for variable in model.weights]
    blocks = PlacedBlocks([pack_weights(weights, specs, slices) for slices in parts], parts)
    return Trainer(model, metrics, specs, parts), blocks


def dense_model(optimizer="sgd", layers=(), model=keras.Sequential, **options):
    built = model([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    built.compile(optimizer, "mse", **options)
    return built


class ThroughStrings(keras.layers.Layer):
    """XLA knows no strings."""

    def call(self, x):
        return x + tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(x)))


def test_model_that_cannot_be_jit_compiled_runs_with_a_warning(caplog):
    trainer, blocks = make_trainer(dense_model(layers=[ThroughStrings()], jit_compile=True))
    with caplog.at_level(logging.WARNING):
        assert trainer.train((X, Y), blocks).push.gradients[0]["float32"].any()
        trainer.train((X, Y), blocks)
        assert trainer.predict(X).shape == (4, 1)
    assert sum("without jit_compile" in record.message for record in caplog.records) == 1


def test_step_of_a_jit_compiled_model_is_compiled():
    trainer, blocks = make_trainer(dense_model(jit_compile=True))
    assert trainer.computation._steps.model_step._jit_compile
    assert trainer.train((X, Y), blocks).push.dense_variables == (0, 1)


class Picky(keras.Sequential):
    """Its step updates the bias only where samples have weights."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        weights = self.trainable_weights[: len(data) - 1]
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply([tf.cast(gradient, "float64") for gradient in gradients], weights)
        return {}


def test_variables_of_a_push_are_those_of_its_own_batch():
    trainer, blocks = make_trainer(dense_model(model=Picky))
    both, one = (X, Y, np.ones(4, "float32")), (X, Y)
    pushed = [trainer.train(batch, blocks).push for batch in (both, one, both, one)]
    assert [push.dense_variables for push in pushed] == [(0, 1), (0,), (0, 1), (0,)]
    assert [push.gradients[0]["float32"].size for push in pushed] == [4, 3, 4, 3]
    assert pushed[0].loss == 0.0, "the step logs none"


def test_step_that_updates_what_it_did_not_when_the_job_started_is_refused():
    trainer, blocks = make_trainer(dense_model(model=Picky), step=StepVariables({0: 0}, {0: 0}))
    trainer.train((X, Y), blocks)
    with pytest.raises(ModelFileError, match=r"gradients of '.*bias' now"):
        trainer.train((X, Y, np.ones(4, "float32")), blocks)


def test_clipping_that_no_server_can_do_alone_is_refused():
    optimizer = keras.optimizers.SGD(global_clipnorm=1.0, gradient_accumulation_steps=2)
    make_trainer(dense_model(optimizer))
    with pytest.raises(ModelFileError, match=r"each of the 2 parameter servers .*--num_ps=1"):
        make_trainer(dense_model(keras.optimizers.SGD.from_config(optimizer.get_config())), num_ps=2)


def test_own_predict_step_is_what_predicts():
    class Doubling(keras.Sequential):
        def predict_step(self, data):
            return {"double": 2.0 * self(data[0])}

    model = dense_model(model=Doubling)
    trainer, _ = make_trainer(model)
    np.testing.assert_allclose(trainer.predict((X,))["double"], 2.0 * model(X).numpy())


def test_weights_left_out_of_weight_decay_are_told_to_the_servers():
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    assert [spec.no_weight_decay for spec in variable_specs(dense_model(optimizer))] == [False, True]


@pytest.mark.parametrize("jit_compile", [True, False])
def test_layer_that_assigns_to_its_own_trainable_kernel_is_refused(jit_compile):
    normalized = keras.layers.SpectralNormalization(keras.layers.Dense(4))
    trainer, blocks = make_trainer(dense_model(layers=[normalized], jit_compile=jit_compile))
    with pytest.raises(ModelFileError, match=r"assigns a value to '.*kernel', which an optimizer also updates"):
        trainer.train((X, Y), blocks)
