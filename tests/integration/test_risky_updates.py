"""What a job with several asynchronous workers says of gradients that come late."""

import re

import numpy as np

from jobs import job_settings, run_job, write_model_file

BATCH, BATCHES = 4, 50  # of a task, whose loss is told when it ends
LABELS = [1.0] * 12 + [9.0, 1.0] * 4  # of each task
MODEL_FILE = """
    import keras

    def custom_model():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])

    loss = "mse"

    def optimizer():
        return keras.optimizers.SGD(0.0, momentum=0.9)
"""


def test_workers_that_apply_late_gradients_are_a_risk_and_jumps_of_the_loss_are_a_sign(tmp_path):
    path = write_model_file(tmp_path, MODEL_FILE, "still")
    labels = np.repeat(np.float32(LABELS), BATCH * BATCHES)[:, None]
    np.savez(tmp_path / "train.npz", x=np.ones((len(labels), 4), np.float32), y=labels)
    settings = job_settings(
        path,
        tmp_path / "job",
        training=str(tmp_path / "train.npz"),
        minibatch_size=BATCH,
        num_minibatches_per_task=BATCHES,
        num_workers=3,
        shuffle_seed=None,
        use_async=True,
    )
    _, display = run_job(settings)
    (risk,) = [said for said in display.messages if "updates late" in said]
    assert "momentum of SGD" in risk
    (sign,) = [said for said in display.messages if "loss jumped" in said]
    assert re.match(
        r"The training loss jumped to [\d.]+ from 1, which suggests that the gradients of [23] workers", sign
    )
