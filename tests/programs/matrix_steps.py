"""The catalogue's models whose point is how they are compiled or trained: losses, metrics, steps, dtypes."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from catalogue import Given, case, compiled, dense, integers, normal
from matrix_models import Plain

# ---------------------------------------------------------------- losses and metrics


@case("Losses and metrics", "metrics over all records: `AUC`, `Precision`, `F1Score`")
def statistics() -> Given:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, "sigmoid")])
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"), "accuracy"]
    metrics += [keras.metrics.F1Score(threshold=0.5, average="macro", name="f1")]
    return Given(
        compiled(model, loss="binary_crossentropy", metrics=metrics), normal(6), integers(2, 1).astype("float32")
    )


@case("Losses and metrics", "metrics whose state is a list, dict, array, maximum or metric")
def states_of_python() -> Given:
    class Median(keras.metrics.Metric):
        def reset_state(self):
            self.predicted = {}

        def update_state(self, y, y_pred, sample_weight=None):
            self.predicted = {"all": np.append(self.predicted.get("all", ()), np.asarray(y_pred))}

        def result(self):
            values = self.predicted.get("all", [0.0])
            return {"median": float(np.median(values)), "last": float(values[-1])}

    class Of(keras.metrics.Metric):
        def __init__(self, name, function):
            super().__init__(name=name)
            self.inner, self.function = keras.metrics.MeanAbsoluteError(), function
            self.peak = self.add_weight(shape=(), initializer="zeros", name="peak")

        def update_state(self, y, y_pred, sample_weight=None):
            self.inner.update_state(y, y_pred)
            self.peak.assign(self.function(self.peak, ops.max(y_pred)))

        def result(self):
            return self.peak + self.inner.result()

    median = Median(name="median")
    median.reset_state()
    metrics = [median, Of("peak", ops.maximum), Of("total", ops.add)]
    return Given(dense(run_eagerly=True, metrics=metrics), normal(6), normal(1))


@case("Losses and metrics", "`add_loss`, regularizers (also of activities), constraints")
def added_losses() -> Given:
    class Sparse(layers.Layer):
        def call(self, x):
            self.add_loss(0.01 * ops.mean(ops.abs(x)))
            return x

    class Bounded(keras.constraints.Constraint):
        def __call__(self, w):
            return ops.clip(w, -0.3, 0.3)

    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1", kernel_constraint="max_norm"),
            Sparse(),
            layers.Dense(1, kernel_constraint=Bounded()),
        ]
    )
    return Given(compiled(model), normal(6), normal(1))


# ---------------------------------------------------------------- steps


@case("Steps", "custom `train_step`, `test_step`, `predict_step`, with their own trackers")
def own_steps() -> Given:
    class Steps(Plain):
        def __init__(self):
            super().__init__()
            self.error = keras.metrics.Mean(name="error")

        @property
        def metrics(self):
            return [self.error]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean((y - self(x, training=True)) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            self.error.update_state(loss)
            return {"error": self.error.result()}

        def test_step(self, data):
            x, y = data
            self.error.update_state(ops.mean(ops.abs(y - self(x))))
            return {"error": self.error.result()}

        def predict_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"twice": 2.0 * self(x)}

    model = Steps()
    model.compile(keras.optimizers.Adam(0.01))
    return Given(model, normal(6), normal(1))


@case("Steps", "custom `compute_loss` and `compute_metrics`")
def own_loss() -> Given:
    class Loss(Plain):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(ops.abs(y - y_pred)) + 0.01 * sum(ops.sum(w * w) for w in self.trainable_weights)

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return {**super().compute_metrics(x, y, y_pred, sample_weight)}

    return Given(compiled(Loss()), normal(6), normal(1))


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def call(self, x):
        return self.generator(x)

    def train_step(self, real):
        noise = ops.sin(37.0 * real)
        truth, ones = ops.concatenate([ops.ones((8, 1)), ops.zeros((8, 1))]), ops.ones((8, 1))
        with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
            made = self.generator(noise, training=True)
            d_loss = self.loss_fn(truth, self.discriminator(ops.concatenate([real, made])))
            g_loss = self.loss_fn(ones, self.discriminator(made))
        d_weights, g_weights = self.discriminator.trainable_weights, self.generator.trainable_weights
        self.d_optimizer.apply_gradients(zip(d_tape.gradient(d_loss, d_weights), d_weights, strict=True))
        self.g_optimizer.apply(g_tape.gradient(g_loss, g_weights), g_weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def test_step(self, real):
        loss = self.loss_fn(ops.ones_like(real[:, :1]), self.discriminator(self.generator(real)))
        self.g_loss.update_state(loss)
        return {"g_loss": self.g_loss.result()}


@case("Steps", "several optimizers, with a custom `compile` (a GAN)")
def gan() -> Given:
    discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    generator = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.BatchNormalization()])
    generator.add(layers.Dense(6))
    model = GAN(discriminator, generator)
    model.compile(
        keras.optimizers.Adam(0.05, beta_1=0.5),
        keras.optimizers.RMSprop(0.002, global_clipnorm=0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return Given(model, normal(6))


class Average(Plain):
    """Trains one part; another is its moving average, as in mean teacher, BYOL and diffusion models."""

    def __init__(self):
        super().__init__()
        self.average = layers.Dense(8)
        self.unused = self.add_weight(shape=(2,), name="unused")

    def build(self, shape):
        super().build(shape)
        self.average.build((None, 6))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((y - self(x, training=True)) ** 2)
        variables = [*self.hidden.trainable_weights, *self.out.trainable_weights, self.unused]
        for weight, average in zip(self.hidden.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss, "parts": {"z": ops.max(self.average.kernel), "a": loss}}


@case("Steps", "a part that the step averages (EMA)")
def average() -> Given:
    model = Average()
    model.build((None, 6))
    model.compile(keras.optimizers.AdamW(0.01), "mse")
    return Given(model, normal(6), normal(1))


@case("Steps", "custom `fit`, `evaluate` and `predict` that call `super()`")
def own_methods() -> Given:
    class Methods(Plain):
        def fit(self, x, y, **kwargs):
            return super().fit(x, 2 * y, **kwargs)

        def evaluate(self, *args, **kwargs):
            weights = self.get_weights()
            self.set_weights([weight / 2 for weight in weights])
            logs = super().evaluate(*args, **kwargs)
            self.set_weights(weights)
            return {**logs, "sum": sum(logs.values())}

        def predict(self, x, **kwargs):
            return -super().predict(x, **kwargs)

    return Given(compiled(Methods()), normal(6), normal(1))


@case("Steps", "a batch size that the data fixes, used as a number")
def fixed_batch_size() -> Given:
    class Contrast(keras.losses.Loss):
        def call(self, y, y_pred):
            scores = ops.matmul(y_pred, ops.transpose(y_pred)) * (1.0 - ops.eye(y_pred.shape[0]))
            return ops.mean((y - y_pred) ** 2) + 0.01 * ops.mean(scores)

    return Given(dense(loss=Contrast()), normal(6), normal(1))


@case("Steps", "`jit_compile=True`")
def jit_compile() -> Given:
    return Given(dense(jit_compile=True), normal(6), normal(1))


@case("Steps", "`steps_per_execution` (accepted, without effect)")
def steps_per_execution() -> Given:
    return Given(dense(steps_per_execution=2), normal(6), normal(1))


# ---------------------------------------------------------------- dtypes


@case("Dtypes", "`mixed_bfloat16`", tolerance=1e-2)
def mixed_bfloat16() -> Given:
    return Given(dense(dtype="mixed_bfloat16"), normal(6), normal(1))


@case("Dtypes", "`mixed_float16` (with the `LossScaleOptimizer` that Keras adds)", tolerance=1e-3)
def mixed_float16() -> Given:
    return Given(dense(dtype="mixed_float16"), normal(6), normal(1))


@case("Dtypes", "float64 weights", tolerance=1e-10)
def float64() -> Given:
    return Given(dense(dtype="float64"), normal(6), normal(1))


@case("Dtypes", "float16 weights", tolerance=1e-2)
def float16() -> Given:
    return Given(dense(dtype="float16", optimizer=keras.optimizers.SGD(0.1)), normal(6), normal(1))


@case("Dtypes", "bfloat16 weights", tolerance=5e-2)
def bfloat16() -> Given:
    return Given(dense(dtype="bfloat16", optimizer=keras.optimizers.SGD(0.1)), normal(6), normal(1))
