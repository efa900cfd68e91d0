"""Jobs of a small model with callbacks of Keras."""

import csv

import keras
import numpy as np

from jobs import job_settings, run_job, write_model_file

MODEL_FILE = """
    import keras
    import numpy as np

    FOLDER = {folder!r}

    def custom_model():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile({optimizer}, loss="mse", metrics=["mae"])
        return model

    class Final(keras.callbacks.Callback):
        def on_train_end(self, logs=None):  # on the worker that exports the model
            np.savez(FOLDER + "/final.npz", *self.model.get_weights())

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise OSError("the power is out")

    def callbacks():
        return [{callbacks}]
"""
SGD = "keras.optimizers.SGD(0.05)"
BATCHES = 20  # of an epoch


def write_data(folder):
    generator = np.random.default_rng(0)
    for name, count in (("train", 320), ("test", 64)):
        x = generator.normal(size=(count, 4)).astype("float32")
        y = np.sin(x.sum(1, keepdims=True)).astype("float32")
        np.savez(folder / f"{name}.npz", x=x, y=y)


def train(folder, callbacks, epochs=4, validation=True, optimizer=SGD, **parts):
    """Trains with callbacks, given as the text of a list's items; answers the summary and the display."""
    if not (folder / "train.npz").exists():
        write_data(folder)
    text = MODEL_FILE.format(folder=str(folder), callbacks=callbacks, optimizer=optimizer)
    # Each a module of its own: a process imports a model file once.
    path = write_model_file(folder, text, f"stock_{len([*folder.glob('stock_*.py')])}")
    settings = job_settings(
        path,
        folder / "job",
        training=str(folder / "train.npz"),
        validation=str(folder / "test.npz") if validation else "",
        minibatch_size=16,
        num_minibatches_per_task=5,
        num_epochs=epochs,
        **parts,
    )
    return run_job(settings)


def rows_of(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def final_weights(folder):
    with np.load(folder / "final.npz") as file:
        return [file[f"arr_{index}"] for index in range(len(file.files))]


def saved_weights(path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.load_weights(path)
    return model.get_weights()


def assert_same(weights, others, rtol=1e-5, atol=1e-6):
    for weight, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(weight, other, rtol=rtol, atol=atol)


def distance(weights, others):
    return max(np.abs(weight - other).max() for weight, other in zip(weights, others, strict=True))
