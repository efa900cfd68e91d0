"""Models that train in a way of their own, or that contain other models."""

from __future__ import annotations

import functools

import keras
from keras import layers, ops

from catalogue import BATCH, Given, case, compiled, normal

whole = functools.partial(case, "Models within models", everywhere=True)
generative = functools.partial(case, "Generative models", everywhere=True)


def small(size: int = 6, units: int = 1) -> keras.Model:
    return keras.Sequential([keras.Input((size,)), layers.Dense(5, "tanh"), layers.Dense(units)])


# ---------------------------------------------------------------- models within models


@whole("transfer learning: a trained, frozen base, which is then unfrozen")
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


@whole("surgery: layers replaced, popped and added")
def surgery():
    base = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh", name="hidden"), layers.Dense(3), layers.ReLU()])
    base.pop()
    base.add(layers.Dense(4, name="added"))
    cut = keras.Model(base.inputs, [base.get_layer("hidden").output, base.outputs[0]])
    inputs = keras.Input((6,))
    return Given(
        compiled(keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(cut(inputs))))), normal(6), normal(1)
    )


@whole("a clone as a target network, updated between two fits")
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


@whole("a subclass that returns a dict, with a loss for one of its values")
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


@generative("a VAE with a seeded sampler, `compute_loss` and trackers")
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
