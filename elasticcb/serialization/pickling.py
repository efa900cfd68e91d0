"""Pickles Python objects that may contain Keras objects: cloudpickle, which supports definitions in scripts, notebooks
and functions, combined with Keras's own serialization."""

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
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.serialization import keras_config

# Their state is their config, if their class has one; layers also have weights.
_BY_CONFIG = (
    keras.losses.Loss,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.regularizers.Regularizer,
    keras.Initializer,
    keras.constraints.Constraint,
    keras.metrics.Metric,
)

_PARTS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.Variable)
_TF_FUNCTION = type(tf.function(lambda: None))


def dumps(value: Any, what: str, model: keras.Model | None = None, refers: bool = True) -> bytes:
    """Pickles `value`.

    Args:
        what: name of the value in messages.
        model: references to it, its layers, weights and optimizers, also from callbacks and closures, become references
            to the model given to `loads`.
        refers: False if such references are not allowed.

    Raises:
        UsageError: something in it can't be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, model, refers).dump(value)
    except UsageError:
        raise
    except Exception as error:  # any error of a user's __reduce__
        raise UsageError(
            f"{what} can't be sent to the workers: {type(error).__name__}: {error}. It is pickled with "
            "cloudpickle. Remove objects that belong to this process only (locks, open files, connections), or create "
            "them where they are used."
        ) from error
    return buffer.getvalue()


def loads(data: bytes, model: keras.Model | None = None) -> Any:
    """The inverse of `dumps`. Use it only for data of a process that has the job's token."""
    return _Unpickler(io.BytesIO(data), model).load()


def register(kind: type, reduce: Callable[[Any], Any]) -> None:
    """Objects of `kind` are pickled by `reduce`, which works like `__reduce__`."""
    _reducers[kind] = reduce


_reducers: dict[type, Callable[[Any], Any]] = {}


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: Any, model: keras.Model | None, refers: bool) -> None:
        super().__init__(file)
        self._model = model
        self._refers = refers
        self._indices: dict[int, int] | None = None  # in `_parts`, by id

    def persistent_id(self, obj: Any) -> int | None:
        if self._model is None or not isinstance(obj, _PARTS):
            return None
        if self._refers:
            if self._indices is None:
                self._indices = {id(part): index for index, part in enumerate(_parts(self._model))}
            return self._indices.get(id(obj))
        if obj is self._model:
            raise UsageError(
                "A function or class that the model uses (a loss, a metric, a layer) refers to the model itself, by a "
                "global variable or a closure. Workers would get a second copy of the model with it. Make it a method "
                "of the model (compute_loss, compute_metrics, train_step), or pass it the values that it needs "
                "instead."
            )
        return None

    def reducer_override(self, obj: Any) -> Any:
        for kind, reduce in _reducers.items():
            if isinstance(obj, kind):
                return reduce(obj)
        if isinstance(obj, keras.random.SeedGenerator):
            return _from_config, (keras_config.write(obj),)
        if isinstance(obj, _BY_CONFIG):
            if keras_config.is_as_it_is(type(obj)):
                return obj.__reduce_ex__(2) if type(obj).__reduce__ is object.__reduce__ else _by_attributes(obj)
            return _from_config, (keras_config.write(obj),)
        if isinstance(obj, _TF_FUNCTION):  # without its traces, which belong to this process
            options = {name: getattr(obj, f"_{name}") for name in ("autograph", "jit_compile", "reduce_retracing")}
            return _tf_function, (obj.python_function, obj.input_signature, options)
        if isinstance(obj, keras.Variable):
            return _variable, (obj.numpy(), obj.dtype, obj.trainable, obj.name)
        if isinstance(obj, tf.Variable):
            return tf.Variable, (obj.numpy(), obj.trainable)
        if isinstance(obj, tf.Tensor) and hasattr(obj, "numpy"):
            return tf.constant, (obj.numpy(), obj.dtype.name)
        if isinstance(obj, types.ModuleType) and f"{obj.__name__}.".startswith(("keras", "torch.")):
            # These modules are created at import, and cloudpickle would take some of them apart.
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
    """A model and its parts, in the same order in every process."""
    return [model, *model_optimizers(model), *model._flatten_layers(include_self=False), *model.weights]


def _tf_function(function: Any, input_signature: Any, options: dict[str, Any]) -> Any:
    return tf.function(function, input_signature=input_signature, **options)


def _by_attributes(obj: Any) -> Any:
    return _with_attributes, (type(obj),), vars(obj), None, None, _set_attributes


def _with_attributes(kind: type) -> Any:
    return object.__new__(kind)


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _from_config(written: keras_config.Written) -> Any:
    return keras_config.read(written)


def _variable(value: Any, dtype: str, trainable: bool, name: str) -> keras.Variable:
    return keras.Variable(value, dtype=dtype, trainable=trainable, name=name)
