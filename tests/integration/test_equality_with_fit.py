"""One synchronous worker and Keras's own `fit`, fed the same batches, end at the same weights."""

import numpy as np
import pytest
from model_file_jobs import final_weights, load_module, weights_saver

from deep_cases import deep_but
from jobs import job_settings, run_job, write_model_file

MODEL_FILE = """
    import keras
    import numpy as np

    BATCHES, BATCH = 50, 16

    class HalfSigned(keras.optimizers.Optimizer):
        "A user's own optimizer, with a slot of its own."

        def build(self, variables):
            super().build(variables)
            self.traces = self.add_optimizer_variables(variables, "trace")

        def update_step(self, gradient, variable, learning_rate):
            trace = self.traces[self._get_variable_index(variable)]
            self.assign(trace, 0.7 * trace + gradient)
            self.assign_sub(variable, learning_rate * (0.5 * trace + 0.5 * keras.ops.sign(trace)))

    def optimizer():
        return {optimizer}

    def custom_model():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([{layers}])
        model.compile(optimizer=optimizer(), loss="mse")
        return model

    def data():
        generator = np.random.default_rng(5)
        x = {x}
        return x, generator.normal(size=(BATCHES * BATCH, 1)).astype("float32")

    def feed(dataset, mode, metadata):
        return dataset.map(lambda record: (record["x"], record["y"]))

    def callbacks():
        return [SaveWeights()]
"""

DENSE = {
    "layers": "keras.Input((6,)), keras.layers.Dense(8, activation='tanh', kernel_regularizer='l2'), "
    "keras.layers.BatchNormalization(), keras.layers.Dense(1)",
    "x": "generator.normal(size=(BATCHES * BATCH, 6)).astype('float32')",
}
# No id twice in a batch: where an id repeats, Keras squares its gradients one by one, not their sum
# (docs/parameter_servers.md).
EMBEDDING = {
    "layers": "keras.Input((2,), dtype='int32'), keras.layers.Embedding(40, 4), keras.layers.Flatten(), "
    "keras.layers.Dense(1)",
    "x": "np.concatenate([generator.permutation(40)[:32].reshape(16, 2) for _ in range(BATCHES)]).astype('int32')",
}


def train_both(tmp_path, optimizer, shape, num_ps=1):
    """The weights after the job, and after `fit`."""
    text = MODEL_FILE.format(optimizer=optimizer, **shape) + weights_saver(tmp_path)
    path = write_model_file(tmp_path, text, "equality")
    module = load_module(path)
    x, y = module.data()
    np.savez(tmp_path / "data.npz", x=x, y=y)

    settings = job_settings(
        path,
        tmp_path / "job",
        training=str(tmp_path / "data.npz"),
        minibatch_size=module.BATCH,
        num_minibatches_per_task=module.BATCHES,
        updates="sync",
        num_ps=num_ps,
    )
    run_job(settings)
    model = module.custom_model()
    model.fit(x, y, batch_size=module.BATCH, epochs=1, shuffle=False, verbose=0)
    return final_weights(tmp_path), model.get_weights()


def assert_equal(ours, theirs):
    for mine, keras_own in zip(ours, theirs, strict=True):
        scale = np.abs(keras_own).max()
        np.testing.assert_allclose(mine, keras_own, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "optimizer",
    deep_but(
        [
            "keras.optimizers.SGD(0.05, momentum=0.9)",
            "keras.optimizers.Adam(0.01)",
            "keras.optimizers.AdamW(0.01, weight_decay=0.01)",
            "keras.optimizers.Adagrad(0.05)",
            "keras.optimizers.RMSprop(0.01)",
            "keras.optimizers.Ftrl(0.05)",
            "keras.optimizers.Lion(0.001)",
            "HalfSigned(0.01)",
            "keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.8), global_clipnorm=0.5)",
            "keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)",
        ],
        "HalfSigned(0.01)",
    ),
)
def test_weights_equal_those_of_fit(tmp_path, optimizer):
    assert_equal(*train_both(tmp_path, optimizer, DENSE))


def test_weights_equal_those_of_fit_with_two_servers(tmp_path):
    assert_equal(*train_both(tmp_path, "keras.optimizers.Adam(0.01)", DENSE, num_ps=2))


@pytest.mark.parametrize(
    "optimizer",
    deep_but(
        ["keras.optimizers.SGD(0.05)", "keras.optimizers.Adagrad(0.05)", "HalfSigned(0.01)"],
        "keras.optimizers.Adagrad(0.05)",
    ),
)
def test_row_gradients_of_an_embedding_end_where_fit_ends(tmp_path, optimizer):
    assert_equal(*train_both(tmp_path, optimizer, EMBEDDING))
