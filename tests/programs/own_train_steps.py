"""Models with a training step of their own, and hooks that change what it does."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from catalogue import BATCH, Given, case, compiled, normal
from own_training import small

step = functools.partial(case, "Steps of your own")


class Tracked(keras.Model):
    """With a tracker of its own, and `call` of its network."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.network(x)

    def learn(self, loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of()
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        x, y = data
        self.tracker.update_state(ops.mean((self.network(x) - y) ** 2))
        return {"loss": self.tracker.result()}


@step("gradients that the step clips and accumulates")
def accumulated_by_hand():
    class Accumulating(keras.Model):
        def __init__(self, network, every):
            super().__init__()
            self.network, self.every = network, every
            self.count = self.add_weight((), "zeros", dtype="int32", trainable=False, name="count")
            self.sums = [
                self.add_weight(w.shape, "zeros", trainable=False, name=f"sum_{i}")
                for i, w in enumerate(network.weights)
            ]

        def call(self, x):
            return self.network(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.network.trainable_weights), 0.5)
            self.count.assign_add(1)
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.assign_add(gradient / self.every)
            due = ops.cast(ops.equal(self.count % self.every, 0), "float32")
            rate = self.optimizer.learning_rate
            for weight, total in zip(self.network.trainable_weights, self.sums, strict=True):
                weight.assign_sub(due * rate * total)
                total.assign((1 - due) * total)
            return self.compute_metrics(x, y, self(x, training=False))

    return Given(compiled(Accumulating(small(), 2), optimizer=keras.optimizers.SGD(0.1)), normal(6), normal(1))


@step("a step with sample weights and a second pass (consistency training)")
def consistency():
    class Consistent(Tracked):
        def train_step(self, data):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

            def loss():
                first, second = self.network(x, training=True), self.network(x + 0.1 * ops.sin(x), training=True)
                each = ops.mean((first - y) ** 2, -1)
                return ops.mean(weight * each) + 0.5 * ops.mean((first - ops.stop_gradient(second)) ** 2)

            return self.learn(loss)

        def test_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return super().test_step((x, y))

    model = Consistent(small())
    model.compile("adam")
    weights = np.linspace(0, 2, 32, dtype="float32")
    return Given(model, normal(6), normal(1), weights)


@step("a physics-informed network, with `jit_compile`")
def physics_informed():
    class Physics(Tracked):
        def train_step(self, data):
            x, y = data

            def loss():
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    value = self.network(x)
                slope = tape.gradient(value, x)
                return ops.mean((value - y) ** 2) + 0.1 * ops.mean((ops.sum(slope, 1, keepdims=True) - y) ** 2)

            return self.learn(loss)

    model = Physics(small())
    model.compile("adam", jit_compile=True)
    return Given(model, normal(6), normal(1))


@step("momentum contrast: a queue of keys")
def key_queue():
    class Contrast(Tracked):
        def __init__(self, network, size):
            super().__init__(network)
            self.keys = keras.models.clone_model(network)
            self.keys.set_weights(network.get_weights())
            self.keys.trainable = False
            self.queue = self.add_weight((size, 4), "random_normal", trainable=False, name="queue")

        def train_step(self, x):
            keys = ops.normalize(self.keys(x + 0.1), -1)

            def loss():
                query = ops.normalize(self.network(x), -1)
                logits = ops.concatenate(
                    [ops.sum(query * keys, -1, keepdims=True), query @ ops.transpose(self.queue)], 1
                )
                labels = ops.zeros((ops.shape(x)[0],), "int32")
                return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, 5 * logits, from_logits=True))

            logs = self.learn(loss)
            self.queue.assign(ops.concatenate([keys, self.queue[:-BATCH]], 0))
            for own, key in zip(self.network.weights, self.keys.weights, strict=True):
                key.assign(0.9 * key + 0.1 * own)
            return logs

    model = Contrast(small(6, 4), 2 * BATCH)
    model.compile("adam")
    return Given(model, normal(6), test=(), options={"validation_data": None})


@step("`train_step` that calls Keras's own; own `compile` and `make_train_function`")
def steps_around_keras():
    class Around(keras.Model):
        def __init__(self):
            super().__init__()
            self.network, self.noise = small(), 0.0
            self.norm = keras.metrics.Mean(name="norm")

        def compile(self, *args, noise=0.0, **kwargs):
            super().compile(*args, **kwargs)
            self.noise = noise

        def call(self, x):
            return self.network(x)

        def train_step(self, data):
            x, y = data
            logs = super().train_step((x + self.noise * ops.sin(9 * x), y))
            self.norm.update_state(sum(ops.sum(w * w) for w in self.trainable_weights))
            return {**logs, "norm": self.norm.result()}

    model = Around()
    model.compile("adam", "mse", metrics=["mae"], noise=0.2)
    return Given(model, normal(6), normal(1))


@step("`if` and `for` on tensors in a step and a loss (AutoGraph)")
def branches_on_tensors():
    class Branch(Tracked):
        @tf.function
        def damped(self, loss):
            for _ in tf.range(2):
                if loss > 1.0:  # noqa: SIM108
                    loss = loss / 2.0
                else:
                    loss = loss + 0.1
            return loss

        def train_step(self, data):
            x, y = data
            return self.learn(lambda: self.damped(capped(y, self.network(x))))

    @tf.function
    def capped(y, y_pred):
        error = tf.reduce_mean(tf.square(y - y_pred))
        if error > 0.5:
            return error
        return error**2

    model = Branch(small())
    model.compile("adam")
    return Given(model, normal(6), normal(1))


@step("two optimizers besides `model.optimizer`")
def own_optimizers():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = small(), small()

        def compile(self, of_second, of_first):
            super().compile()
            self.of_second, self.of_first = of_second, of_first

        def call(self, x):
            return self.first(x) + self.second(x)

        def train_step(self, data):
            x, y = data
            for part, optimizer in ((self.first, self.of_first), (self.second, self.of_second)):
                with tf.GradientTape() as tape:
                    loss = ops.mean((self(x, training=True) - y) ** 2)
                variables = part.trainable_variables
                optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    class Lower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.of_second.learning_rate = 0.01 / (epoch + 2)

    model = Pair()
    model.compile(keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01))
    options = {"callbacks": [Lower()], "epochs": 3, "validation_data": None}
    return Given(model, normal(6), normal(1), options=options, test=())


@step("eager steps that keep batches in a list and a copy of weights; trained twice")
def counting_steps():
    class Follower(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer, self.copy, self.seen = layers.Dense(1), layers.Dense(1, trainable=False), []

        def call(self, x):
            self.copy(x)
            return self.layer(x)

        def train_step(self, data):
            self.seen.append(data)
            logs = super().train_step(self.seen[len(self.seen) // 2])
            for slow, weight in zip(self.copy.weights, self.layer.weights, strict=True):
                slow.assign(slow + (weight - slow) / len(self.seen))
            return {**logs, "steps": len(self.seen)}

    model = Follower()
    model.compile("adam", "mse", run_eagerly=True)
    options = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    return Given(model, normal(6), normal(1), then=lambda fit: fit(model, normal(6), normal(1), **options))


@step("counts and the state of an RNN, which a hook resets")
def set_back():
    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.rnn, self.layer = layers.GRU(3, stateful=True), layers.Dense(1)
            self.steps, self.seen = 0, keras.Variable(0.0, trainable=False)

        def call(self, x):
            return self.layer(self.rnn(x))

        def train_step(self, data):
            self.steps += 1
            self.seen.assign(self.seen + 1.0)
            return super().train_step(data)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return (1.0 + self.steps + self.seen) * ops.mean((y - y_pred) ** 2)

    class Back(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.steps = 0
            self.model.seen.assign(0.0)
            self.model.rnn.reset_state()

    model = Counting()
    model.compile("adam", run_eagerly=True)
    options = {"epochs": 3, "validation_data": None, "callbacks": [Back()]}
    return Given(model, normal(4, 2), normal(1), options=options, test=(), after=lambda: [model.steps, model.seen])


@step("hooks that reset the momentum, and set a regularizer")
def hooks_that_set():
    class Scaled(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def call(self, y, predicted):
            return self.factor * ops.mean((y - predicted) ** 2, -1)

    class Set(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            loss.factor *= 0.5

        def on_epoch_begin(self, epoch, logs=None):
            for variable in self.model.optimizer.variables[2:]:
                variable.assign(ops.zeros_like(variable))
            self.model.layers[0].kernel_regularizer.l2 = 0.1 * epoch
            loss.factor = 1.0

    loss = Scaled()
    hidden = layers.Dense(5, "tanh", kernel_regularizer=keras.regularizers.L2(0.1))
    model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, run_eagerly=True)
    return Given(model, normal(6), normal(1), options={"callbacks": [Set()], "epochs": 3}, test=())
