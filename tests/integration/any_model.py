"""Trains one model by a job and by Keras's own `fit`, on the same batches."""

import importlib.util
import json
import textwrap

import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.versions import find_latest
from jobs import job_settings, run_job, write_model_file

BATCH = 8

PRELUDE = """
    import json
    import pathlib
    import keras
    import numpy as np
    import tensorflow as tf
    from keras import layers, ops

    generator = np.random.default_rng(5)

    def normal(*shape):
        return generator.normal(size=shape).astype("float32")

    class KeepLogs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(logs))

    def callbacks():
        return [KeepLogs()]

    def feed(dataset, mode, metadata):
        return prepare(dataset)

    def prepare(dataset):
        return dataset.map(example)

    def example(record):
        return record["x"], record["y"]
"""


class Comparison:
    """Of a job with one synchronous worker and `fit`.

    Args:
        text: defines `arrays()`, their records become examples by `example(record)` or `prepare(dataset)`, and
            `custom_model()`.
        settings: of the job.
    """

    def __init__(self, tmp_path, text, batch=BATCH, epochs=1, fits=True, **settings):
        name = f"any_{abs(hash(str(tmp_path)))}"
        path = write_model_file(tmp_path, textwrap.dedent(PRELUDE) + textwrap.dedent(text), name)
        spec = importlib.util.spec_from_file_location(f"{name}_fit", path)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        arrays = self.arrays = self.module.arrays()
        np.savez(tmp_path / "data.npz", **arrays)
        count = len(next(iter(arrays.values())))
        settings = {"updates": "sync", "num_ps": 1} | settings
        self.validates = "validation" in settings
        if self.validates:
            settings["validation"] = str(tmp_path / "data.npz")
        self.summary, self.display = run_job(
            job_settings(
                path,
                tmp_path / "job",
                training=str(tmp_path / "data.npz"),
                minibatch_size=batch,
                num_minibatches_per_task=-(-count // batch),
                num_epochs=epochs,
                directory=str(tmp_path / "checkpoints"),
                **settings,
            )
        )
        self.weights = saved_weights(tmp_path / "checkpoints")
        self.logs = json.loads(path.with_suffix(".json").read_text())
        if fits:
            self._fit(arrays, batch, epochs)

    def _fit(self, arrays, batch, epochs):
        self.model = self.module.custom_model()
        dataset = self.module.prepare(tf.data.Dataset.from_tensor_slices(arrays)).batch(batch)
        validation = dataset if self.validates else None
        self.history = self.model.fit(dataset, epochs=epochs, verbose=0, validation_data=validation).history

    def assert_weights_equal(self):
        for mine, keras_own in zip(self.weights, self.model.get_weights(), strict=True):
            mine, keras_own = mine.astype("float64"), keras_own.astype("float64")
            scale = np.abs(keras_own).max()
            np.testing.assert_allclose(mine, keras_own, rtol=1e-5, atol=1e-5 * scale)

    def assert_logs_equal(self):
        expected = {name: values[-1] for name, values in self.history.items()}
        assert set(self.logs) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(self.logs[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def saved_weights(folder):
    """The whole variables in the newest checkpoint, put together from all servers' files."""
    version = find_latest(folder)
    manifest = read_manifest(version)
    flat = [np.empty(int(np.prod(v["shape"])), v["dtype"]) for v in manifest["variables"]]
    for server in manifest["servers"]:
        tensors = load_file(version / server["files"][0]["name"])
        for variable, start, stop in server["slices"]:
            flat[variable][start:stop] = tensors[f"weight/{variable}"].reshape(-1)
    return [array.reshape(v["shape"]) for array, v in zip(flat, manifest["variables"], strict=True)]
