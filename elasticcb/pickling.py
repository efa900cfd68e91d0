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
from elasticcb.optimizer_traits import model_optimizers

# Their state is their config; models and layers have weights besides.
_BY_CONFIG = (
    keras.losses.Loss,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.regularizers.Regularizer,
    keras.Initializer,
)

_PARTS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.Variable)
_TF_FUNCTION = type(tf.function(lambda: None))


def dumps(value: Any, what: str, model: keras.Model | None = None) -> bytes:
    """`value`, pickled.

    Args:
        what: for messages, what the caller knows it as.
        model: stands for itself: references to it, also from callbacks and closures, become references to the
            model that `loads` is given; so do those to its layers, weights and optimizers. Other models travel as
            copies, with their weights.

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
        self._indices: dict[int, int] | None = None  # in `_parts`, by id

    def persistent_id(self, obj: Any) -> int | None:
        if self._model is None or not isinstance(obj, _PARTS):
            return None
        if self._indices is None:
            self._indices = {id(part): index for index, part in enumerate(_parts(self._model))}
        return self._indices.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Model):
            return _model, (save_model(obj), _pickled_objects(obj), obj.get_weights())
        if isinstance(obj, _TF_FUNCTION):  # without its traces, which belong to this process
            options = {name: getattr(obj, f"_{name}") for name in ("autograph", "jit_compile", "reduce_retracing")}
            return _tf_function, (obj.python_function, obj.input_signature, options)
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
        self._parts: list[Any] | None = None

    def persistent_load(self, index: int) -> Any:
        if self._model is None:
            return None
        if self._parts is None:
            self._parts = _parts(self._model)
        return self._parts[index]


def _parts(model: keras.Model) -> list[Any]:
    """A model and what it is made of, in the same order in every process."""
    return [model, *model_optimizers(model), *model._flatten_layers(include_self=False), *model.weights]


def _model(data: bytes, objects: bytes, weights: list[Any]) -> keras.Model:
    model = restore_model(data, objects)
    model.set_weights(weights)
    return model


def _tf_function(function: Any, input_signature: Any, options: dict[str, Any]) -> Any:
    return tf.function(function, input_signature=input_signature, **options)


def _pickled_objects(value: Any) -> bytes:
    return cloudpickle.dumps(custom_objects(value))


def _from_config(config: Any, objects: bytes) -> Any:
    found: dict[str, Callable[..., Any]] = cloudpickle.loads(objects)
    return keras.saving.deserialize_keras_object(config, custom_objects=found, safe_mode=False)
