"""NaN and infinities in losses and gradients of jobs."""

import numpy as np
import pytest
from model_file_jobs import RECORDS, final_weights, weights_saver, write_arrays

from elasticcb.errors import JobFailedError
from elasticcb.settings import NonFinite
from jobs import job_settings, run_job, write_model_file

MODEL_FILE = """
    import keras
    import numpy as np
    import tensorflow as tf

    @keras.saving.register_keras_serializable()
    def root(x):
        return tf.sqrt(x)  # its gradient at 0 is infinite

    def custom_model():
        keras.utils.set_random_seed(1)
        return keras.Sequential([
            keras.Input((6,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, name="last", kernel_initializer=INITIALIZER, activation=ACTIVATION),
        ])

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return keras.optimizers.SGD(0.01)

    def feed(dataset, mode, metadata):
        return dataset.map(lambda record: (record["x"], record["y"]))

    def callbacks():
        return [SaveWeights()]
"""


def settings(tmp_path, data, initializer="'ones'", activation="None", **parts):
    text = MODEL_FILE.replace("INITIALIZER", initializer).replace("ACTIVATION", activation)
    path = write_model_file(tmp_path, text + weights_saver(tmp_path), f"non_finite_{abs(hash(tmp_path))}")
    return job_settings(path, tmp_path / "job", training=data, minibatch_size=8, **parts)


def data_with_nan(path):
    write_arrays(path)
    with np.load(path) as arrays:
        x, y = arrays["x"], arrays["y"]
    x[3], x[50] = np.nan, np.inf
    np.savez(path, x=x, y=y)
    return str(path)


def test_infinite_gradient_stops_the_job_and_names_the_variable(tmp_path):
    data = write_arrays(tmp_path / "data.npz")
    with pytest.raises(JobFailedError, match=r"The new value of '.*batch_norm.* holds NaN or infinity"):
        run_job(settings(tmp_path, data, "'zeros'", "root", updates="async"))


def test_loss_that_is_not_finite_stops_the_job(tmp_path):
    with pytest.raises(JobFailedError, match=r"The loss is (nan|inf) \(version .*smaller .*skip"):
        run_job(settings(tmp_path, data_with_nan(tmp_path / "data.npz")))


def test_skipped_batches_are_counted_and_leave_no_trace(tmp_path):
    data = data_with_nan(tmp_path / "data.npz")
    summary, _ = run_job(settings(tmp_path, data, non_finite=NonFinite.SKIP, num_workers=2, num_ps=2))
    assert summary.batches_skipped == 2
    assert summary.version == RECORDS // 8 - 2
    for weight in final_weights(tmp_path):
        assert np.isfinite(weight).all()
