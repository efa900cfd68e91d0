"""What TensorFlow may compute with, in a process whose Keras is on another framework."""

from __future__ import annotations

import contextlib

import tensorflow as tf


def leave_gpus() -> None:
    """TensorFlow, which reads the data, leaves the GPUs of this process to others."""
    with contextlib.suppress(RuntimeError):  # it has computed already, in the caller's program
        tf.config.set_visible_devices([], "GPU")
