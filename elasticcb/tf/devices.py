"""The devices of TensorFlow in a process whose Keras backend is another framework."""

from __future__ import annotations

import contextlib

import tensorflow as tf


def leave_gpus() -> None:
    """Makes TensorFlow, which only reads the data here, leave the GPUs to others."""
    with contextlib.suppress(RuntimeError):  # already initialized by the caller's program
        tf.config.set_visible_devices([], "GPU")
