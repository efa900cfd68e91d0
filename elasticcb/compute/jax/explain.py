"""Explains errors of JAX in terms of the model."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

import jax
import tensorflow as tf

from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback

_TENSORFLOW = os.path.dirname(tf.__file__) + os.sep
_NOT_TRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


def explain(error: Exception) -> str:
    """What happened, and what to do; "" if the error is clear by itself."""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return (
            f"it keeps an array of a traced step beyond the step: {_first_line(error)}. State that a step "
            "changes must be in a keras.Variable of the model, or of one of its layers or metrics."
        )
    if _goes_through_tensorflow(error):
        return (
            f"it calls TensorFlow with a JAX array ({_first_line(error)}). With KERAS_BACKEND=jax the model, its "
            "loss and its metrics are traced by JAX: use keras.ops or jax.numpy in them instead of tf. "
            "The input pipeline can keep using TensorFlow: tf.data works with every backend."
        )
    if isinstance(error, _NOT_TRACEABLE):
        return (
            f"it can't be traced by JAX ({_first_line(error)}). Use keras.ops (keras.ops.cond, keras.ops.where) or "
            "jax.numpy where Python's `if`, float() or NumPy reads array values; or compile the model with "
            "run_eagerly=True, or jit_compile=False, which is slow."
        )
    return ""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Converts errors of a step to a `ModelFileError` with advice, if known."""
    try:
        yield
    except ElasticCBError:
        raise
    except Exception as error:
        found = explain(error)
        if not found:
            raise
        raise ModelFileError(f"The model's step can't run: {found}", user_traceback(error)) from error


def _goes_through_tensorflow(error: BaseException | None) -> bool:
    while error is not None:
        if any(frame.filename.startswith(_TENSORFLOW) for frame in traceback.extract_tb(error.__traceback__)):
            return True
        error = error.__cause__
    return False


def _first_line(error: Exception) -> str:
    lines = describe(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
