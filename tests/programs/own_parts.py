"""Losses, metrics, optimizers, schedules and callbacks as users write them, with state and without configs."""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers, ops

from catalogue import BATCH, RECORDS, Given, case, compiled, dense, integers, normal

loss_or_metric = functools.partial(case, "Losses and metrics of your own", everywhere=True)
optimizer = functools.partial(case, "Optimizers and schedules of your own", everywhere=True)
callback = functools.partial(case, "Callbacks", everywhere=True)


def truth() -> np.ndarray:
    return integers(2, 1).astype("float32")


def classifier(**options) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(1, "sigmoid")])
    return compiled(model, **{"loss": "binary_crossentropy", **options})


class KeepLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append([epoch, *(float(each) for each in logs.values())])


# ---------------------------------------------------------------- losses and metrics


@loss_or_metric("focal and dice losses: closures, and default arguments in a loop")
def losses_of_a_loop():
    def focal(gamma):
        def loss(y, p):
            p = ops.clip(p, 1e-6, 1 - 1e-6)
            return -ops.mean(y * (1 - p) ** gamma * ops.log(p) + (1 - y) * p**gamma * ops.log(1 - p), -1)

        return loss

    def dice(y, p, smooth=1.0):
        return 1 - (2 * ops.sum(y * p) + smooth) / (ops.sum(y) + ops.sum(p) + smooth)

    inputs, losses = keras.Input((6,)), {"focal": focal(2.0), "dice": dice}
    for quantile in (0.1, 0.9):
        losses[f"q{quantile:.0%}".rstrip("%")] = lambda y, p, q=quantile: ops.mean(
            ops.maximum(q * (y - p), (q - 1) * (y - p))
        )
    model = keras.Model(inputs, {name: layers.Dense(1, "sigmoid", name=name)(inputs) for name in losses})
    model.compile("adam", losses, metrics={"focal": ["accuracy"]})
    return Given(model, normal(6), dict.fromkeys(losses, truth()))


@loss_or_metric("a loss that holds a frozen model (a perceptual loss)")
def perceptual_loss():
    features = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(3)])
    features.trainable = False

    class Perceptual(keras.losses.Loss):
        def __init__(self, network, weight):
            super().__init__()
            self.network, self.weight = network, weight

        def call(self, y, y_pred):
            near = ops.mean((y - y_pred) ** 2, -1)
            return near + self.weight * ops.mean((self.network(y) - self.network(y_pred)) ** 2, -1)

    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(6)])
    return Given(compiled(model, loss=Perceptual(features, 0.5)), normal(6), normal(6))


@loss_or_metric("a loss of NumPy class weights, in a bound method")
def loss_of_a_bound_method():
    class Weighted:
        def __init__(self, weights):
            self.weights = np.asarray(weights, "float32")

        def loss(self, y, logits):
            each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            return each * ops.take(self.weights, ops.cast(ops.reshape(y, (-1,)), "int32"))

        def hits(self, y, logits):
            return ops.cast(ops.equal(ops.cast(ops.reshape(y, (-1,)), "int64"), ops.argmax(logits, -1)), "float32")

    weighted = Weighted([0.2, 1.0, 3.0])
    return Given(dense(units=3, loss=weighted.loss, metrics=[weighted.hits]), normal(6), integers(3))


@loss_or_metric("a loss and a layer that share a variable")
def shared_temperature():
    temperature = keras.Variable(0.7, trainable=False, name="temperature")

    class Scaled(layers.Layer):
        def call(self, x):
            return x / temperature

    def loss(y, y_pred):
        return SCALE * temperature * ops.mean((y - y_pred) ** 2, -1)

    SCALE.assign(0.25)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), Scaled(), layers.Dense(1)])
    return Given(compiled(model, loss=loss), normal(6), normal(1))


SCALE = keras.Variable(1.0, trainable=False)


@loss_or_metric("a loss that draws random numbers")
def random_loss():
    class Noisy(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(7)

        def call(self, y_true, y_pred):
            scale = keras.random.uniform((), seed=self.seed)
            if keras.backend.backend() != "jax":  # where it would be the same in each batch
                scale += keras.random.uniform(())
            return ops.mean((y_true - y_pred) ** 2, -1) * scale

    model, x, y = dense(loss=Noisy()), normal(6), normal(1)

    def then(fit):
        return fit(model, x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)

    return Given(model, x, y, test=(), then=then)


@loss_or_metric("a loss and a layer that count their calls")
def counting():
    import tensorflow as tf

    class Running(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.scale = keras.Variable(1.0, trainable=False)

        def call(self, y_true, y_pred):
            errors = ops.mean((y_true - y_pred) ** 2, -1)
            self.scale.assign(0.9 * self.scale + 0.1 * ops.mean(errors))
            return errors / (1e-3 + ops.stop_gradient(self.scale))

    class Count(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = tf.Variable(0.0, trainable=False)

        def call(self, x):
            if keras.backend.backend() != "tensorflow":
                return x
            self.calls.assign_add(1.0)
            return x * (1 + 0.01 * self.calls)

    model = compiled(keras.Sequential([keras.Input((6,)), Count(), layers.Dense(1)]), loss=Running())
    x, y = normal(6), normal(1)

    def then(fit):
        return fit(model, x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)

    return Given(model, x, y, test=(), then=then)


@loss_or_metric("learned weights of tasks, with `add_loss`")
def uncertainty_weighting():
    class Endpoint(layers.Layer):
        def __init__(self, count):
            super().__init__()
            self.scales = [self.add_weight((), "zeros", name=f"log_variance_{i}") for i in range(count)]

        def call(self, pairs):
            for scale, (y, y_pred) in zip(self.scales, pairs, strict=True):
                self.add_loss(ops.exp(-scale) * ops.mean((y - y_pred) ** 2) + scale)
            return pairs[0][1]

    inputs = {name: keras.Input((size,), name=name) for name, size in (("x", 6), ("a", 1), ("b", 1))}
    heads = [(inputs[name], layers.Dense(1)(inputs["x"])) for name in "ab"]
    model = keras.Model(inputs, Endpoint(2)(heads))
    model.compile(keras.optimizers.Adam(0.01))
    return Given(model, {"x": normal(6), "a": normal(1), "b": normal(1, seed=6)})


@loss_or_metric("metrics with state, a `result` that is a dict, and no `get_config`")
def metrics_with_state():
    class Confusion(keras.metrics.Metric):
        def __init__(self, threshold, name="counts"):
            super().__init__(name=name)
            self.threshold = threshold
            self.counts = self.add_variable((2, 2), "zeros", name="counts")

        def update_state(self, y, p, sample_weight=None):
            y, p = (ops.cast(ops.reshape(each > self.threshold, (-1,)), "int32") for each in (y, p))
            pairs = ops.one_hot(2 * y + p, 4)
            self.counts.assign_add(ops.reshape(ops.cast(ops.sum(pairs, 0), "float32"), (2, 2)))

        def result(self):
            right, found = self.counts[0, 0] + self.counts[1, 1], self.counts[1, 1]
            return {"right": right / ops.sum(self.counts), "found": found / ops.sum(self.counts[1])}

    class Precise(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="precise")
            self.positive, self.true = keras.metrics.Sum(name="positive"), keras.metrics.Sum(name="true")

        def update_state(self, y, p, sample_weight=None):
            p = ops.cast(p > 0.5, "float32")
            self.positive.update_state(p)
            self.true.update_state(y * p)

        def result(self):
            return self.true.result() / (self.positive.result() + keras.config.epsilon())

        def reset_state(self):
            self.positive.reset_state()
            self.true.reset_state()

    return Given(classifier(metrics=[Confusion(0.5), Precise(), "accuracy"]), normal(6), truth())


@loss_or_metric("a maximum, and an average over batches, in batch logs")
def metrics_that_do_not_add_up():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.error = self.add_variable((), "zeros", name="error")

        def update_state(self, y, p, sample_weight=None):
            self.error.assign(ops.maximum(self.error, ops.max(ops.abs(y - p))))

        def result(self):
            return 1.0 * self.error

    class Recent(Largest):
        def __init__(self):
            super().__init__()
            self.name = "recent"

        def update_state(self, y, p, sample_weight=None):
            self.error.assign(0.9 * self.error + 0.1 * ops.mean(ops.abs(y - p)))

    class Batches(KeepLogs):
        def on_train_batch_end(self, batch, logs=None):
            self.on_epoch_end(batch, logs)

        def on_test_batch_end(self, batch, logs=None):
            self.on_epoch_end(batch, logs)

    batches = Batches()
    model = dense(metrics=["mae", Largest(), Recent()])
    # More batches of validation than a task has.
    options = {"callbacks": [batches], "validation_data": (normal(6), normal(1)), "validation_batch_size": 1}
    return Given(model, normal(6), normal(1), options=options, after=lambda: batches.seen)


@loss_or_metric("`MeanMetricWrapper`, partials and lambdas as metrics, an output without a loss")
def wrapped_metrics():
    def near(y, y_pred, within=0.1):
        return ops.cast(ops.abs(y - y_pred) < within, "float32")

    inputs = keras.Input((6,))
    hidden = layers.Dense(4, "tanh")(inputs)
    model = keras.Model(inputs, [layers.Dense(1)(hidden), hidden])
    metrics = [keras.metrics.MeanMetricWrapper(near, name="near", within=0.5), functools.partial(near, within=1.0)]
    model.compile("adam", ["mse", None], metrics=[metrics, None])
    return Given(model, normal(6), [normal(1), normal(4)])


# ---------------------------------------------------------------- optimizers and schedules


class Boosted(keras.optimizers.SGD):
    """Without `get_config`."""

    def __init__(self, rate, boosts):
        super().__init__(rate)
        self.boosts = boosts

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.boosts.get(variable.name, 1.0), variable, learning_rate)


@optimizer("an optimizer without `get_config`, with a rate per variable")
def boosted_optimizer():
    return Given(dense(optimizer=Boosted(0.05, {"bias": 3.0})), normal(6), normal(1))


@optimizer("an optimizer with slots of its own")
def optimizer_with_slots():
    class Sign(keras.optimizers.Optimizer):
        def __init__(self, learning_rate, decay):
            super().__init__(learning_rate=learning_rate)
            self.decay = decay

        def build(self, variables):
            if not self.built:
                super().build(variables)
                self.means = [self.add_variable_from_reference(each, name="mean") for each in variables]

        def update_step(self, gradient, variable, learning_rate):
            mean = self.means[self._get_variable_index(variable)]
            self.assign(mean, self.decay * mean + (1 - self.decay) * gradient)
            self.assign_sub(variable, learning_rate * ops.tanh(10 * mean))

    return Given(dense(optimizer=Sign(0.05, 0.8)), normal(6), normal(1))


@optimizer("an optimizer that holds another optimizer; trained twice")
def optimizer_in_optimizer():
    class Outer(keras.optimizers.Optimizer):
        def __init__(self, inner):
            super().__init__(learning_rate=0.05)
            self.inner = inner

        def build(self, variables):
            super().build(variables)
            self.inner.build(variables)

        def update_step(self, gradient, variable, learning_rate):
            self.inner.update_step(gradient, variable, learning_rate)

    given = Given(dense(optimizer=Outer(keras.optimizers.SGD(0.05, momentum=0.9))), normal(6), normal(1))
    given.then = lambda fit: fit(given.model, given.x, given.y, batch_size=BATCH, shuffle=False, verbose=0)
    return given


@optimizer("a schedule without `get_config` that calls a function")
def schedule_of_a_function():
    class Warm(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, peak, shape):
            self.peak, self.shape = peak, shape

        def __call__(self, step):
            return self.peak * self.shape(ops.cast(step, "float32"))

    steps = 4.0
    schedule = Warm(0.1, lambda step: ops.minimum((step + 1) / steps, steps / (step + 1)))
    return Given(dense(optimizer=keras.optimizers.SGD(schedule, momentum=0.9)), normal(6), normal(1))


@optimizer("a learning rate that is a function of a variable")
def rate_of_a_function():
    rate = keras.Variable(0.05, trainable=False)
    return Given(dense(optimizer=keras.optimizers.SGD(lambda: 0.5 * rate)), normal(6), normal(1))


# ---------------------------------------------------------------- callbacks


@callback("a callback that sets a variable of a layer (teacher forcing, noise)")
def schedule_of_a_layer():
    class Mix(layers.Layer):
        def __init__(self):
            super().__init__()
            self.share = self.add_weight((), "ones", trainable=False, name="share")

        def call(self, x):
            return self.share * x + (1 - self.share) * ops.sin(3 * x)

    mix = Mix()
    model = compiled(keras.Sequential([keras.Input((6,)), mix, layers.Dense(1)]))
    halve = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: mix.share.assign(0.5**epoch))
    return Given(model, normal(6), normal(1), options={"callbacks": [halve], "epochs": 3})


@callback("callbacks that save the model with its optimizer")
def saving():
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = dense()

    class Saves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.save(folder / "own.keras")

    class Passes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            keras.saving.save_model(self.model, folder / "passed.keras")

    outside = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.save(folder / "outside.keras"))

    def after():
        models = [keras.saving.load_model(folder / f"{name}.keras") for name in ("own", "passed", "outside")]
        return [[np.array(each.numpy()) for each in loaded.optimizer.variables] for loaded in models]

    return Given(model, normal(6), normal(1), options={"callbacks": [Saves(), Passes(), outside]}, after=after)


# On JAX, Keras's own variables have no values during an epoch.
@case("Callbacks", "hooks of batches that read the metrics of the model")
def metrics_read_by_hooks():
    class Reads(KeepLogs):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, self.model.get_metrics_result())

    for hook in ("on_train_batch_end", "on_test_batch_begin", "on_test_batch_end"):
        setattr(Reads, hook, lambda self, batch, logs=None: self.on_epoch_end(batch))
    reads = Reads()
    options = {"callbacks": [reads], "validation_data": (normal(6), normal(1)), "validation_batch_size": 1}
    return Given(dense(), normal(6), normal(1), options=options, after=lambda: reads.seen)


@callback("batch hooks that reset the metrics, or evaluate the model")
def metrics_set_by_hooks():
    class Sets(KeepLogs):
        def on_train_batch_begin(self, batch, logs=None):
            if batch != 1:
                self.model.reset_metrics()

        def on_train_batch_end(self, batch, logs=None):
            self.on_epoch_end(batch, logs)
            if batch == 2 and len(self.seen) > 4:
                self.model.evaluate(x[:20], y[:20], verbose=0)

        def on_test_batch_end(self, batch, logs=None):
            self.on_epoch_end(batch, logs)
            if batch == 29:
                self.model.reset_metrics()

    sets, x, y = Sets(), normal(6), normal(1)
    options = {"callbacks": [sets], "epochs": 2, "validation_data": (x, y), "validation_batch_size": 1}
    return Given(dense(), x, y, options=options, after=lambda: sets.seen)


@callback("a callback that averages weights over epochs (SWA)")
def weight_averaging():
    class Average(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.kept = []

        def on_epoch_end(self, epoch, logs=None):
            self.kept.append(self.model.get_weights())

        def on_train_end(self, logs=None):
            self.model.set_weights([np.mean(each, 0) for each in zip(*self.kept, strict=True)])

    return Given(dense(), normal(6), normal(1), options={"callbacks": [Average()], "epochs": 3})


@callback("a callback that predicts at the end of an epoch")
def predicting_callback():
    class Predict(keras.callbacks.Callback):
        def __init__(self, x):
            super().__init__()
            self.x, self.means = x, []

        def on_epoch_end(self, epoch, logs=None):
            self.means.append(float(np.mean(self.model.predict(self.x, verbose=0))))
            logs["mean"] = self.means[-1]

    predict = Predict(normal(6)[:5])
    return Given(dense(), normal(6), normal(1), options={"callbacks": [predict]}, after=lambda: predict.means)


@callback("callbacks that stop training before a batch", tolerance=1e-5)
def stopping_before_a_batch():
    class Stop(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_epoch_begin(self, epoch, logs=None):
            self.seen.append(epoch)
            self.model.stop_training = epoch == 2

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(logs["loss"])

    stop = Stop()
    given = Given(dense(), normal(6), normal(1), np.linspace(0, 2, RECORDS, dtype="float32"))
    given.options, given.after = {"callbacks": [stop], "epochs": 4}, lambda: stop.seen
    return given


class Annealed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(8, "tanh"), layers.Dense(1)
        self.beta, self._gamma = 0.0, 0.0

    def call(self, x):
        return self.last(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred) ** 2) + (self.beta + self._gamma) * ops.mean(y_pred**2) * SHARE


SHARE = 1.0


def anneal(model, share_of):
    def set_all(epoch, logs=None):
        global SHARE
        SHARE = share_of(epoch)
        model.beta, model._gamma = 0.3 * (epoch + 1), 0.1 * epoch
        model.optimizer.momentum = 0.5 + 0.1 * epoch

    return keras.callbacks.LambdaCallback(on_epoch_begin=set_all)


@callback("a callback that sets attributes and a global, which an eager step reads")
def annealing_eagerly():
    global SHARE
    SHARE, model = 1.0, Annealed()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), run_eagerly=True)
    return Given(
        model, normal(6), normal(1), options={"callbacks": [anneal(model, lambda e: 1 - 0.2 * e)], "epochs": 3}
    )


@callback("the same in a compiled step, which keeps its first values")
def annealing():
    global SHARE
    SHARE, model = 1.0, Annealed()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5))
    return Given(
        model, normal(6), normal(1), options={"callbacks": [anneal(model, lambda e: 1 - 0.2 * e)], "epochs": 3}
    )


@dataclasses.dataclass
class Record:
    batch: int
    loss: float


RECORDED: list[Record] = []
COLLECTED: list[int] = []
OPTIONS = argparse.Namespace(scale=1.0)
DRAWS = np.random.default_rng(3)


def record(batch, loss):
    RECORDED.append(Record(batch, float(loss)))


def scaled(y, y_pred):
    return OPTIONS.scale * ops.mean((y - y_pred) ** 2, -1)


@callback("hooks that draw random numbers, call a function that keeps records, and set a namespace")
def drawing_hooks():
    class Draw(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen, self.COLLECTED = [], COLLECTED

        def on_epoch_begin(self, epoch, logs=None):
            OPTIONS.scale = 1.0 + epoch
            self.seen.append(np.random.rand())

        def on_train_batch_begin(self, batch, logs=None):
            kernel = self.model.weights[0]
            kernel.assign_add(0.1 * np.random.normal(size=kernel.shape) + 0.1 * DRAWS.normal())

        def on_train_batch_end(self, batch, logs=None):
            record(batch, logs["loss"])
            self.COLLECTED.append(batch)
            self.seen.append(batch == self.params["steps"] - 1)

        def on_epoch_end(self, epoch, logs=None):
            self.seen += [np.random.rand(), DRAWS.random()]

    global DRAWS
    RECORDED.clear()
    COLLECTED.clear()
    DRAWS, draw, model = np.random.default_rng(3), Draw(), dense()
    model.compile(keras.optimizers.SGD(0.05), scaled, run_eagerly=True)
    seen = lambda: [draw.seen, [(each.batch, each.loss) for each in RECORDED], COLLECTED, DRAWS.random()]  # noqa: E731
    return Given(model, normal(6), normal(1), options={"callbacks": [draw], "epochs": 3}, after=seen)


@callback("a callback that compiles the model for the next stage")
def staged():
    model = dense()
    stage = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mae", metrics=["mse"])
    )
    x, y = normal(6), normal(1)

    def then(fit):
        return fit(model, x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)

    return Given(model, x, y, options={"callbacks": [stage]}, then=then)
