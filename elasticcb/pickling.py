"""Pickles of Python objects that may hold Keras objects: cloudpickle, which takes what is defined in a script, a
notebook or a function, with Keras's own serialization for what Keras knows to serialize."""

from __future__ import annotations

import importlib
import io
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import keras
import tensorflow as tf

from elasticcb.errors import UsageError
from elasticcb.model_archive import custom_objects, restore_model, save_model

# Their state is their config; models and layers have weights besides.
_BY_CONFIG = (
    keras.losses.Loss,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.regularizers.Regularizer,
    keras.Initializer,
)


def dumps(value: Any, what: str, model: keras.Model | None = None) -> bytes:
    """`value`, pickled.

    Args:
        what: for messages, what the caller knows it as.
        model: stands for itself: references to it, also from callbacks and closures, become references to the
            model that `loads` is given.

    Raises:
        UsageError: something in it can't be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, model).dump(value)
    except Exception as error:  # whatever the __reduce__ of a user's class raises
        raise UsageError(
            f"{what} can't be sent to the workers: {type(error).__name__}: {error}. It is pickled with "
            "cloudpickle: leave out what belongs to this process alone (locks, open files, connections), or make it "
            "where it is used."
        ) from error
    return buffer.getvalue()


def loads(data: bytes, model: keras.Model | None = None) -> Any:
    """What `dumps` pickled. Only for data of a process that holds the job's token."""
    return _Unpickler(io.BytesIO(data), model).load()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: Any, model: keras.Model | None) -> None:
        super().__init__(file)
        self._model = model

    def persistent_id(self, obj: Any) -> str | None:
        return "model" if obj is self._model and obj is not None else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Model):
            return restore_model, (save_model(obj), _pickled_objects(obj))
        if isinstance(obj, _BY_CONFIG):
            return _from_config, (keras.saving.serialize_keras_object(obj), _pickled_objects(obj))
        if isinstance(obj, keras.Variable):
            return keras.Variable, (obj.numpy(), None, obj.dtype, obj.trainable)
        if isinstance(obj, tf.Variable):
            return tf.Variable, (obj.numpy(), obj.trainable)
        if isinstance(obj, tf.Tensor) and hasattr(obj, "numpy"):
            return tf.constant, (obj.numpy(), obj.dtype.name)
        if isinstance(obj, types.ModuleType) and obj.__name__.startswith("keras"):
            # Keras's modules are made at import, and cloudpickle would take some of them apart.
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


class _Unpickler(cloudpickle.pickle.Unpickler):
    def __init__(self, file: Any, model: keras.Model | None) -> None:
        super().__init__(file)
        self._model = model

    def persistent_load(self, name: str) -> Any:
        return self._model


def _pickled_objects(value: Any) -> bytes:
    return cloudpickle.dumps(custom_objects(value))


def _from_config(config: Any, objects: bytes) -> Any:
    found: dict[str, Callable[..., Any]] = cloudpickle.loads(objects)
    return keras.saving.deserialize_keras_object(config, custom_objects=found, safe_mode=False)
