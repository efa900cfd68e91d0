"""Objects of custom classes without a config: layers and models by their state.

A layer's config then has the arguments of its Keras base class, its variables, layers and metrics, and its other
attributes. Weight values are left out, because the parameter servers hold them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras.src.models.functional import Functional

# Replacements of methods that Keras (and this project, during training) sets on a layer.
METHODS = frozenset({"build", "quantize", "compute_metrics", "train_step", "test_step", "predict_step", "get_config"})
# Not sent: results of the caller, and constructor arguments.
_LEFT_OUT = frozenset(
    {"history", "stop_training", "stop_evaluating", "stop_predicting", "_auto_config", "_auto_config_error_args"}
)
_PLAIN = (bool, int, float, str, type(None))
_BY_CONFIG = (
    keras.Operation,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.Initializer,
    keras.DTypePolicy,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.random.SeedGenerator,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)


def put(item: Any, objects: dict[str, Any]) -> dict[str, str]:
    """A reference to an object that is sent separately, in `objects`."""
    for name, known in objects.items():
        if known is item:
            return {"__object__": name}
    name = f"__object__{len(objects)}"
    objects[name] = item
    return {"__object__": name}


def read(layer: keras.layers.Layer, objects: dict[str, Any]) -> dict[str, Any]:
    """The config of a layer, from its state.

    Args:
        objects: receives objects that are neither plain nor Keras's.
    """
    base = _keras_base(type(layer))
    whole = _holds_nothing(base)
    variables = [*layer._trainable_variables, *layer._non_trainable_variables] if whole else []
    inner, added = _inner_layers(layer) if whole else ([], [])
    metrics = list(layer._metrics) if whole else []
    known: dict[int, Any] = {}
    for kind, items in (("variable", variables), ("layer", [*inner, *added]), ("metric", metrics)):
        known.update({id(item): {f"__{kind}__": index} for index, item in enumerate(items)})
    left_out = own_names() | METHODS | _LEFT_OUT
    attributes = {
        name: _encoded(value, known, objects)
        for name, value in _attributes(layer).items()
        if name not in left_out and (whole or not isinstance(value, keras.Variable))
    }
    if _is_functional(layer):
        config: Any = keras.Model(layer._inputs_struct, layer._outputs_struct, name=layer.name)
    elif base is keras.Sequential:
        config = {"name": layer.name, "trainable": layer.trainable}
        inner, added = [], layer._layers
    else:
        config = base.get_config(layer)
    return {
        "base": config,
        "variables": [_outline(variable) for variable in variables],
        "layers": list(added),
        "metrics": metrics,
        "attributes": attributes,
        "built": layer.built and whole,
    }


def write(kind: type, config: dict[str, Any], objects: Mapping[str, Any]) -> Any:
    """The object whose config `put` or `read` made.

    Args:
        kind: its class.
    """
    if "__object__" in config:
        return objects[config["__object__"]]
    new: Any = kind.__new__
    layer: Any = new(kind)
    added = [keras.saving.deserialize_keras_object(item) for item in config["layers"]]
    inner: list[Any] = []
    base, given = _keras_base(kind), config["base"]
    if "class_name" in given:
        network = Functional.from_config(given["config"])
        base.__init__(layer, network._inputs_struct, network._outputs_struct, name=network.name)
        inner, _ = _inner_layers(layer)
    elif base is keras.Sequential:
        base.__init__(layer, name=given["name"], trainable=given["trainable"])
        for item in added:
            base.add(layer, item)
    else:
        dtype = {"dtype": keras.saving.deserialize_keras_object(given["dtype"])} if "dtype" in given else {}
        base.__init__(layer, **{**given, **dtype})
    set_by_base = {} if _holds_nothing(base) else _attributes(layer)
    variables = [_variable(outline) for outline in config["variables"]]
    metrics = [keras.saving.deserialize_keras_object(item) for item in config["metrics"]]
    # In the order of their creation, which is the order of the weights.
    for variable in variables:
        layer._track_variable(variable)
    for item in [*added, *metrics]:
        layer._tracker.track(item)
    known = {"__variable__": variables, "__layer__": [*inner, *added], "__metric__": metrics}
    for name, value in config["attributes"].items():
        if name in set_by_base:
            continue
        decoded = _decoded(value, known, objects)
        if isinstance(getattr(kind, name, None), property):
            vars(layer)[name] = decoded
        else:
            setattr(layer, name, decoded)
    layer.built = config["built"] or layer.built
    return layer


def _attributes(layer: Any) -> dict[str, Any]:
    """Attributes set on a layer: on PyTorch, inner layers are not in its `vars`."""
    return vars(layer) | dict(vars(layer).get("_modules", {}))


def _keras_base(kind: type) -> Any:
    """The nearest base class that belongs to Keras."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("keras."))


def _holds_nothing(base: type) -> bool:
    """Whether Keras's base class adds no variables and layers of its own."""
    return base in (keras.layers.Layer, keras.Model, keras.Sequential) or base.__name__ == "Functional"


def _is_functional(layer: Any) -> bool:
    return hasattr(layer, "_inputs_struct") and hasattr(layer, "_outputs_struct")


def _inner_layers(layer: Any) -> tuple[list[Any], list[Any]]:
    """Layers of a functional model's graph, and other inner layers."""
    inner = layer.layers if _is_functional(layer) else []
    graph = [item for item in inner if any(item is operation for operation in layer._operations)]
    return graph, [item for item in layer._layers if all(item is not other for other in graph)]


@functools.cache
def own_names() -> frozenset[str]:
    """Attributes that Keras sets on every layer and model."""

    class Layer(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x

    class Model(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    model: Any = Model()
    model.compile("sgd", "mse", metrics=["mae"])
    inputs = keras.Input((1,))
    names: set[str] = set()
    probes = [
        Layer(),
        model,
        keras.Model(inputs, keras.layers.Identity()(inputs)),
        keras.Sequential([inputs, keras.layers.Identity()]),
    ]
    for probe in probes:
        probe(np.zeros((1, 1), "float32"))
        names |= _attributes(probe).keys()
    return frozenset(names)


def _encoded(value: Any, known: Mapping[int, Any], objects: dict[str, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, _PLAIN + _BY_CONFIG):
        return value
    if isinstance(value, (list, tuple, dict)) and _holds_keras(value, known):
        items = value.values() if isinstance(value, dict) else value
        encoded = [_encoded(item, known, objects) for item in items]
        keys = put(list(value), objects) if isinstance(value, dict) else None
        return {"__items__": encoded, "tuple": isinstance(value, tuple), "keys": keys}
    return put(_untracked(value), objects)


def _holds_keras(value: Any, known: Mapping[int, Any]) -> bool:
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return any(_holds_keras(item, known) for item in items)
    return id(value) in known or isinstance(value, _BY_CONFIG)


def _untracked(value: Any) -> Any:
    """Without Keras's tracking lists, which refer to their layer."""
    if isinstance(value, list):
        return [_untracked(item) for item in value]
    if isinstance(value, set):
        return set(value)
    if isinstance(value, dict) and type(value).__module__.startswith("keras."):
        return {key: _untracked(item) for key, item in value.items()}
    return value


def _decoded(value: Any, known: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    if "__items__" in value:
        items = [_decoded(item, known, objects) for item in value["__items__"]]
        if value["keys"] is not None:
            return dict(zip(objects[value["keys"]["__object__"]], items, strict=True))
        return tuple(items) if value["tuple"] else items
    if "__object__" in value:
        return objects[value["__object__"]]
    for kind, found in known.items():
        if kind in value:
            return found[value[kind]]
    return keras.saving.deserialize_keras_object(value)


def _outline(variable: Any) -> dict[str, Any]:
    return {
        "shape": list(variable.shape),
        "dtype": keras.backend.standardize_dtype(variable.dtype),
        "trainable": variable.trainable,
        "name": variable.name,
        "path": variable.path,
        "aggregation": variable.aggregation,
        "autocast": variable._autocast,
        "regularizer": variable.regularizer,
        "constraint": variable.constraint,
    }


def _variable(outline: dict[str, Any]) -> keras.Variable:
    shape, dtype = tuple(outline["shape"]), outline["dtype"]
    variable = keras.Variable(
        np.zeros(shape, bool) if dtype == "bool" else keras.ops.zeros(shape, dtype),
        dtype=dtype,
        trainable=outline["trainable"],
        autocast=outline["autocast"],
        aggregation=outline["aggregation"],
        name=outline["name"],
    )
    variable._path = outline["path"]
    for name in ("regularizer", "constraint"):
        if outline[name] is not None:
            setattr(variable, name, keras.saving.deserialize_keras_object(outline[name]))
    return variable
