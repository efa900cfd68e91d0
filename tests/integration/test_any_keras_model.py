"""Models as users write them, trained by jobs, end where Keras's own `fit` ends."""

import pytest
from any_model import Comparison
from user_models import MODELS, OWN_STEP, XY

from deep_cases import deep_but

KEPT = ("target_network", "accumulation_with_clipvalue", "several_inside_one")


@pytest.mark.parametrize("name", deep_but(MODELS, *KEPT))
def test_model_ends_where_fit_ends(tmp_path, name):
    comparison = Comparison(tmp_path, MODELS[name])
    comparison.assert_weights_equal()
    comparison.assert_logs_equal()


GAN = """
def arrays():
    return {"x": normal(48, 6)}

def example(record):
    return record["x"]

class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.BatchNormalization(),
            layers.Dense(6)])

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def train_step(self, real):
        noise = ops.sin(37.0 * real)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        ones = ops.ones((ops.shape(real)[0], 1))
        truth = ops.concatenate([ones, 0 * ones])
        with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
            made = self.generator(noise, training=True)
            d_loss = loss(truth, self.discriminator(ops.concatenate([real, made])))
            g_loss = loss(ones, self.discriminator(made))
        d_weights, g_weights = self.discriminator.trainable_weights, self.generator.trainable_weights
        self.d_optimizer.apply_gradients(zip(d_tape.gradient(d_loss, d_weights), d_weights))
        self.g_optimizer.apply(g_tape.gradient(g_loss, g_weights), g_weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"discriminator": self.d_loss.result(), "g_loss": self.g_loss.result()}

def custom_model():
    keras.utils.set_random_seed(3)
    model = GAN()
    model.compile(keras.optimizers.Adam(0.05, beta_1=0.5), keras.optimizers.RMSprop(0.002, global_clipnorm=0.1))
    return model
"""


@pytest.mark.parametrize("num_ps", deep_but([1, 2], 2))
def test_gan_with_two_optimizers_ends_where_fit_ends(tmp_path, num_ps):
    comparison = Comparison(tmp_path, GAN, num_ps=num_ps)
    comparison.assert_weights_equal()
    comparison.assert_logs_equal()


OWN_TEST_STEP = """
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "step": ops.cast(self.optimizer.iterations, "float32")}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.tracker.update_state(ops.mean(ops.abs(y - y_pred)))
        return {"error": self.tracker.result(), "largest": ops.max(y)}
"""


def test_own_test_step_says_what_evaluation_logs(tmp_path):
    text = XY + OWN_STEP.format(body=OWN_TEST_STEP, options=", metrics=['mae']")
    text = text.replace("self.unused = ", 'self.tracker = keras.metrics.Mean(name="tracker"); self.unused = ')
    comparison = Comparison(tmp_path, text, validation=True)
    comparison.assert_weights_equal()
    logs, expected = comparison.logs, {name: values[-1] for name, values in comparison.history.items()}
    assert set(logs) == set(expected)
    assert logs["val_error"] == pytest.approx(expected["val_error"], rel=1e-5)
    assert logs["mae"] == pytest.approx(expected["mae"], rel=1e-5)
    assert logs["val_largest"] == pytest.approx(expected["val_largest"]), "of the last batch"
    assert logs["step"] == expected["step"], "of the last batch"


def test_steps_that_overflow_change_nothing_as_in_fit(tmp_path):
    comparison = Comparison(tmp_path, MODELS["mixed_float16"])
    comparison.assert_weights_equal()
    assert int(comparison.model.optimizer.iterations) < 6


RESNET = """
def arrays():
    y = generator.integers(0, 3, 384)
    x = 0.3 * normal(384, 8, 8, 1)
    x[np.arange(384), y * 2] += 1.5
    return {"x": 3.0 + 2.0 * x, "y": y}

def block(x, filters):
    for _ in range(2):
        y = layers.BatchNormalization(momentum=0.9)(layers.Conv2D(filters, 3, padding="same")(layers.ReLU()(x)))
        x = layers.Add()([x, y])
    return x

def custom_model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8, 8, 1))
    x = layers.BatchNormalization(momentum=0.9)(layers.Conv2D(6, 3, padding="same")(inputs))
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(block(x, 6))))
    model.compile(keras.optimizers.Adam(0.005), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"])
    return model
"""


def test_batch_normalization_of_two_workers_is_right_in_the_weights_that_come_back(tmp_path):
    job = Comparison(tmp_path, RESNET, batch=16, epochs=3, fits=False, updates="async", num_workers=2)
    model = job.module.custom_model()
    model.set_weights(job.weights)
    data = job.module.arrays()
    loss, accuracy = model.evaluate(data["x"], data["y"], verbose=0)
    assert accuracy > 0.9
    assert loss < 0.5
