"""Models that train in a way of their own, or that contain other models."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from catalogue import BATCH, Given, case, compiled, dense, normal

whole = functools.partial(case, "Models within models", everywhere=True)
generative = functools.partial(case, "Generative models", everywhere=True)
step = functools.partial(case, "Steps of your own")


def small(size: int = 6, units: int = 1) -> keras.Model:
    return keras.Sequential([keras.Input((size,)), layers.Dense(5, "tanh"), layers.Dense(units)])


# ---------------------------------------------------------------- models within models


class Distiller(keras.Model):
    def __init__(self, student, teacher, alpha=0.3):
        super().__init__()
        self.student, self.teacher, self.alpha = student, teacher, alpha

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        hard = ops.mean((y_pred - y) ** 2)
        return self.alpha * hard + (1 - self.alpha) * ops.mean((y_pred - self.teacher(x, training=False)) ** 2)


@whole("distillation from a teacher that was compiled and trained")
def distillation():
    teacher = dense()
    teacher.fit(normal(6), normal(1), batch_size=BATCH, shuffle=False, verbose=0)
    teacher.trainable = False
    model = Distiller(small(), teacher)
    model.compile("adam")
    return Given(model, normal(6), normal(1))


@whole("transfer learning: a frozen base that was compiled and trained; then it is unfrozen and trained more slowly")
def transfer_learning():
    inputs = keras.Input((6,))
    x = layers.BatchNormalization()(layers.Dense(5, "tanh")(inputs))
    base = compiled(keras.Model(inputs, layers.Dense(2)(x), name="base"))
    base.fit(normal(6), normal(2), batch_size=BATCH, shuffle=False, verbose=0)
    base.trainable = False
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1)(base(inputs, training=False)))

    def fine_tune(fit):
        base.trainable = True
        compiled(model, optimizer=keras.optimizers.Adam(1e-3))
        return fit(model, normal(6), normal(1), batch_size=BATCH, shuffle=False, verbose=0)

    return Given(compiled(model), normal(6), normal(1), then=fine_tune)


@whole("surgery: an inner layer's output, the last layer replaced, layers popped and added")
def surgery():
    base = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh", name="hidden"), layers.Dense(3), layers.ReLU()])
    base.pop()
    base.add(layers.Dense(4, name="added"))
    cut = keras.Model(base.inputs, [base.get_layer("hidden").output, base.outputs[0]])
    inputs = keras.Input((6,))
    return Given(
        compiled(keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(cut(inputs))))), normal(6), normal(1)
    )


@whole("a clone as a target network, which is updated between two calls of `fit`")
def target_network():
    class Agent(keras.Model):
        def __init__(self, network):
            super().__init__()
            self.network, self.target = network, keras.models.clone_model(network)
            self.target.set_weights(network.get_weights())
            self.target.trainable = False

        def call(self, x):
            return self.network(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            goal = y + 0.9 * ops.max(self.target(ops.sin(x)), -1, keepdims=True)
            return ops.mean((ops.max(y_pred, -1, keepdims=True) - ops.stop_gradient(goal)) ** 2)

    model = Agent(small(units=3))
    model.compile(keras.optimizers.RMSprop(0.01))

    def again(fit):
        model.target.set_weights(model.network.get_weights())
        return fit(model, normal(6), normal(1), batch_size=BATCH, shuffle=False, verbose=0)

    return Given(model, normal(6), normal(1), then=again)


@whole("a stack of models that were trained before, behind a model that is trained (an ensemble)")
def stacking():
    parts = [dense(), dense(optimizer="rmsprop", loss="mae")]
    for index, part in enumerate(parts):
        part.fit(normal(6, seed=index), normal(1), batch_size=BATCH, shuffle=False, verbose=0)
        part.trainable = False
    inputs = keras.Input((6,))
    return Given(
        compiled(keras.Model(inputs, layers.Dense(1)(ops.hstack([p(inputs) for p in parts])))), normal(6), normal(1)
    )


@whole("a model from a `.keras` file, with classes of your own")
def loaded_model():
    import tempfile

    @keras.saving.register_keras_serializable("programs")
    class Scaled(layers.Layer):
        def __init__(self, factor, **kwargs):
            super().__init__(**kwargs)
            self.factor = factor

        def call(self, x):
            return self.factor * x

        def get_config(self):
            return {**super().get_config(), "factor": self.factor}

    model = compiled(keras.Sequential([keras.Input((6,)), Scaled(0.3), layers.Dense(1)]))
    model.fit(normal(6), normal(1), batch_size=BATCH, shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        return Given(keras.saving.load_model(f"{folder}/model.keras"), normal(6), normal(1))


@whole("a subclass that returns a dict, with a loss for one of its values, and one that it adds")
def dict_of_outputs():
    class Multi(keras.Model):
        def __init__(self):
            super().__init__()
            self.body, self.heads = layers.Dense(4, "tanh"), {"u": layers.Dense(1), "v": layers.Dense(2)}

        def call(self, inputs, training=None, mask=None):
            x = self.body(ops.concatenate([inputs["a"], inputs["b"]], -1))
            outputs = {name: head(x) for name, head in self.heads.items()}
            self.add_loss(0.01 * ops.mean(outputs["v"] ** 2))
            return outputs

    model = compiled(Multi(), loss={"u": "mse", "v": None}, metrics={"u": ["mae"]})
    return Given(model, {"a": normal(3), "b": normal(2)}, {"u": normal(1), "v": normal(2)})


# ---------------------------------------------------------------- generative models


class Sampling(layers.Layer):
    def __init__(self, seed):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(seed)

    def call(self, moments):
        mean, log_variance = moments
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)


@generative("a VAE with a seeded sampler, whose loss `compute_loss` adds up, with trackers")
def variational_autoencoder():
    class VAE(keras.Model):
        def __init__(self, encoder, decoder, beta):
            super().__init__()
            self.encoder, self.decoder, self.beta = encoder, decoder, beta
            self.sample = Sampling(1337)
            self.kl = keras.metrics.Mean(name="kl")

        def call(self, x):
            mean, log_variance = ops.split(self.encoder(x), 2, -1)
            kl = -0.5 * ops.mean(1 + log_variance - mean**2 - ops.exp(log_variance))
            return {"made": self.decoder(self.sample((mean, log_variance))), "kl": kl}

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            self.kl.update_state(y_pred["kl"])
            return ops.mean((x - y_pred["made"]) ** 2) + self.beta * y_pred["kl"]

    model = VAE(small(6, 4), small(2, 6), beta=0.2)
    model.compile("adam")
    # Predictions are of other samples.
    return Given(model, normal(6), test=())


@case("Generative models", "a normalizing flow: coupling layers with masks, a loss of the log-determinant")
def normalizing_flow():
    class Flow(keras.Model):
        def __init__(self, couplings):
            super().__init__()
            self.masks = np.array([[0, 1], [1, 0]] * (couplings // 2), "float32")
            self.scales = [keras.Sequential([layers.Dense(5, "relu"), layers.Dense(2, "tanh")]) for _ in self.masks]
            self.moves = [keras.Sequential([layers.Dense(5, "relu"), layers.Dense(2)]) for _ in self.masks]

        def call(self, x):
            total = 0.0
            for mask, scale, move in zip(self.masks, self.scales, self.moves, strict=True):
                kept = x * mask
                s, t = scale(kept) * (1 - mask), move(kept) * (1 - mask)
                x = (1 - mask) * (x * ops.exp(s) + t) + kept
                total = total + ops.sum(s, -1)
            return x, total

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(0.5 * ops.sum(y_pred[0] ** 2, -1) - y_pred[1])

    model = Flow(4)
    model.compile(keras.optimizers.Adam(0.01))
    return Given(model, normal(2))


@generative("diffusion: seeded noise and times in `compute_loss`, a normalizer that was adapted")
def diffusion():
    class Diffusion(keras.Model):
        def __init__(self, size):
            super().__init__()
            self.normalizer, self.network = layers.Normalization(), small(size + 1, size)
            self.seeds = keras.random.SeedGenerator(3)

        def call(self, x):
            return self.normalizer(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            noise = keras.random.normal(ops.shape(y_pred), seed=self.seeds)
            times = keras.random.uniform((ops.shape(y_pred)[0], 1), seed=self.seeds)
            mixed = ops.cos(times) * y_pred + ops.sin(times) * noise
            return ops.mean(ops.abs(noise - self.network(ops.concatenate([mixed, times], -1))))

    model = Diffusion(6)
    model.normalizer.adapt(3 * normal(6) + 1)
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=1e-3))
    return Given(model, normal(6), test=())


@generative("a quantizer whose codebook learns by `add_loss` and a straight-through gradient (VQ-VAE)")
def vector_quantizer():
    class Quantizer(layers.Layer):
        def __init__(self, codes, size, beta=0.25):
            super().__init__()
            self.codes, self.size, self.beta = codes, size, beta
            self.table = self.add_weight((size, codes), "random_uniform", name="table")

        def call(self, x):
            distances = ops.sum(x**2, 1, keepdims=True) - 2 * x @ self.table + ops.sum(self.table**2, 0)
            chosen = ops.one_hot(ops.argmin(distances, 1), self.codes) @ ops.transpose(self.table)
            self.add_loss(self.beta * ops.mean((ops.stop_gradient(chosen) - x) ** 2))
            self.add_loss(ops.mean((chosen - ops.stop_gradient(x)) ** 2))
            return x + ops.stop_gradient(chosen - x)

    inputs = keras.Input((6,))
    outputs = small(3, 6)(Quantizer(5, 3)(small(6, 3)(inputs)))
    return Given(compiled(keras.Model(inputs, outputs)), normal(6), normal(6))


# ---------------------------------------------------------------- steps


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


@step("an exponential moving average of a network in a clone (DDIM, BYOL, mean teacher)")
def moving_average_network():
    class Averaged(Tracked):
        def __init__(self, network):
            super().__init__(network)
            self.average = keras.models.clone_model(network)

        def train_step(self, data):
            x, y = data
            logs = self.learn(
                lambda: ops.mean((self.network(x) - y) ** 2 + 0.1 * (self.network(x) - self.average(x)) ** 2)
            )
            for own, average in zip(self.network.weights, self.average.weights, strict=True):
                average.assign(0.8 * average + 0.2 * own)
            return logs

    model = Averaged(small())
    model.compile(keras.optimizers.AdamW(0.01))
    return Given(model, normal(6), normal(1))


@step("WGAN-GP: several steps of a critic with a penalty on its gradient")
def wasserstein_gan():
    class Wasserstein(keras.Model):
        def __init__(self, critic, generator, steps):
            super().__init__()
            self.critic, self.generator, self.critic_steps = critic, generator, steps
            self.trackers = [keras.metrics.Mean(name="c_loss"), keras.metrics.Mean(name="g_loss")]

        def compile(self, c_optimizer, g_optimizer, c_loss, g_loss):
            super().compile()
            self.c_optimizer, self.g_optimizer, self.c_loss, self.g_loss = c_optimizer, g_optimizer, c_loss, g_loss

        def train_step(self, real):
            noise = ops.sin(17.0 * real[:, :2])
            for _ in range(self.critic_steps):
                with tf.GradientTape() as tape:
                    made = self.generator(noise, training=True)
                    mixed = 0.3 * real + 0.7 * made
                    with tf.GradientTape() as inner:
                        inner.watch(mixed)
                        judged = self.critic(mixed, training=True)
                    slope = ops.sqrt(ops.sum(inner.gradient(judged, mixed) ** 2, 1) + 1e-8)
                    cost = self.c_loss(self.critic(real), self.critic(made)) + 10 * ops.mean((slope - 1) ** 2)
                weights = self.critic.trainable_weights
                self.c_optimizer.apply_gradients(zip(tape.gradient(cost, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                loss = self.g_loss(self.critic(self.generator(noise, training=True)))
            weights = self.generator.trainable_weights
            self.g_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            for tracker, value in zip(self.trackers, (cost, loss), strict=True):
                tracker.update_state(value)
            return {tracker.name: tracker.result() for tracker in self.trackers}

    model = Wasserstein(small(6), small(2, 6), 2)
    model.compile(
        keras.optimizers.Adam(0.002, beta_1=0.5),
        keras.optimizers.Adam(0.002, beta_1=0.5),
        lambda real, made: ops.mean(made) - ops.mean(real),
        lambda made: -ops.mean(made),
    )
    return Given(model, normal(6), test=(), options={"validation_data": None})


@step("gradients that the step clips, accumulates in variables and applies every second batch")
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


@step("a step that takes sample weights, and one more loss from a second pass (consistency training)")
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


@step("a physics-informed network: derivatives by the inputs in the loss, run with `jit_compile`")
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


@step("momentum contrast: a queue of keys that each batch overwrites")
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


@step("`train_step` that calls Keras's own and adds to its logs; `compile` and `make_train_function` of its own")
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


@step("an eager step that branches on values in Python")
def eager_step():
    class Eager(Tracked):
        def train_step(self, data):
            x, y = data
            factor = 2.0 if float(ops.sum(y)) > 0 else 1.0
            return self.learn(lambda: factor * ops.mean((self.network(x) - y) ** 2))

    model = Eager(small())
    model.compile("adam", run_eagerly=True)
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


@step("two optimizers, neither of them `model.optimizer`; a hook lowers the rate of one")
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


@step("eager steps that count, and move a copy of weights that the first step makes; trained twice")
def counting_steps():
    class Follower(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer, self.copy, self.steps = layers.Dense(1), layers.Dense(1, trainable=False), 0

        def call(self, x):
            self.copy(x)
            return self.layer(x)

        def train_step(self, data):
            self.steps += 1
            logs = super().train_step(data)
            for slow, weight in zip(self.copy.weights, self.layer.weights, strict=True):
                slow.assign(slow + (weight - slow) / self.steps)
            return {**logs, "steps": self.steps}

    model = Follower()
    model.compile("adam", "mse", run_eagerly=True)
    options = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    return Given(model, normal(6), normal(1), then=lambda fit: fit(model, normal(6), normal(1), **options))


@step("hooks that forget the momentum, and set a regularizer and the factor of a loss")
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
