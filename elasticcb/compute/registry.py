"""The backends by name."""

from __future__ import annotations

import functools
from importlib import import_module

import keras

from elasticcb.compute.backend import Backend
from elasticcb.errors import UsageError

# By what Keras calls the framework that it runs on: the module and the class. Imported only if it is that.
BACKENDS = {
    "tensorflow": ("elasticcb.compute.tensorflow.backend", "TensorFlowBackend"),
}


@functools.cache
def backend() -> Backend:
    """That of the framework that Keras runs on in this process. Raises `UsageError` when there is none for it."""
    name = keras.backend.backend()
    if name not in BACKENDS:
        known = " or ".join(map(repr, BACKENDS))
        raise UsageError(f"Keras runs on {name!r} here. Expected {known}: set the environment variable KERAS_BACKEND.")
    module, made = BACKENDS[name]
    found: Backend = getattr(import_module(module), made)()
    return found
