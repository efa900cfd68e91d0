"""Keras objects as configs, with the objects that Keras can't put into a config.

Keras stores classes and functions that it does not know by name, and expects the reader to have them. Here each gets a
unique name (two closures of one function are two functions), and is sent with the config. An object of a custom class
without its own `get_config` is sent by its state rather than by constructor arguments: this state is what `fit` would
train.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.layers import InputLayer
from keras.src.models.functional import Functional
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
from keras.src.saving.serialization_lib import ObjectSharingScope

from elasticcb.errors import UsageError
from elasticcb.optimizers.traits import name_publicly
from elasticcb.serialization import layer_state

_KERAS_TYPES = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.DTypePolicy,
    keras.Quantizer,
    keras.Operation,
)
_LIBRARIES = {"keras", "tensorflow", "numpy", "builtins", "functools"}


@dataclass
class Written:
    """A config, and the objects that it refers to by name."""

    config: Any
    objects: dict[str, Any] = field(default_factory=dict)
    as_it_is: set[str] = field(default_factory=set)  # names of classes whose objects are sent by state, not config


def write(root: Any, *beside: Any) -> Written:
    """Config of a Keras object or a structure of them.

    Args:
        beside: further roots whose classes and functions the config refers to.

    Raises:
        UsageError: it refers to a bound method.
        Exception: any error of a user's `get_config`.
    """
    written = Written(None)
    with contextlib.ExitStack() as stack:
        reachable = list(_reachable([root, *beside]))
        name_publicly(item for item in reachable if isinstance(item, keras.optimizers.Optimizer))
        for item in reachable:
            if isinstance(item, (types.FunctionType, type)):
                _name(item, written, stack)
                continue
            kind = type(item)
            if _is_foreign(kind):
                _name(kind, written, stack)
            if isinstance(item, keras.layers.Layer):
                if _is_foreign(kind) and not _has_own_config(kind):
                    written.as_it_is.add(GLOBAL_CUSTOM_NAMES[kind])
                    _replace_get_config(item, functools.partial(layer_state.read, item, written.objects), stack)
            elif not _is_foreign(kind) and not isinstance(item, functools.partial):
                continue
            elif not _has_own_config(kind) and not isinstance(item, keras.optimizers.Optimizer):
                if isinstance(item, functools.partial):
                    _name(kind, written, stack)
                written.as_it_is.add(GLOBAL_CUSTOM_NAMES[kind])
                _replace_get_config(item, functools.partial(layer_state.put, item, written.objects), stack)
        with ObjectSharingScope():
            global_state.set_global_attribute("shared_objects/id_to_config_map", _Layers(reachable))
            written.config = _for_constructors(keras.saving.serialize_keras_object(root), written)
    return written


def read(written: Written, layers: dict[int, Any] | None = None) -> Any:
    """The inverse of `write`.

    Args:
        layers: receives the layers, by their `id` in the writing process.
    """
    with ObjectSharingScope(), keras.saving.custom_object_scope(names(written)):
        made = keras.saving.deserialize_keras_object(written.config, safe_mode=False)
        if layers is not None:
            layers.update(global_state.get_global_attribute("shared_objects/id_to_obj_map"))
        return made


def names(written: Written) -> dict[str, Any]:
    """Objects that Keras must find by name to read a config."""
    found = {
        name: _AsItIs(value, written.objects) if name in written.as_it_is else value
        for name, value in written.objects.items()
    }
    return {**found, "Functional": _Graph}


class _Layers(dict[int, Any]):
    """Makes Keras number all layers when it serializes them, so that a shared layer stays one layer.

    Keras itself only numbers objects that it meets a second time, when the first config may already have been copied.
    """

    def __init__(self, reachable: list[Any]) -> None:
        super().__init__({id(item): {} for item in reachable if isinstance(item, keras.Operation)})

    def __setitem__(self, number: int, config: Any) -> None:
        """Other objects are not numbered."""


class _AsItIs:
    """Replaces a class where Keras creates an object from a config."""

    def __init__(self, kind: type, objects: dict[str, Any]) -> None:
        self._kind, self._objects = kind, objects

    def from_config(self, config: dict[str, Any]) -> Any:
        with _without_calls():
            return layer_state.write(self._kind, config, self._objects)


class _Graph:
    """Replaces Keras's class of functional models.

    Keras numbers the calls of a layer by graph, and looks them up among all its calls: for a layer shared by graphs,
    the calls of other graphs must be hidden meanwhile.
    """

    @staticmethod
    def from_config(config: dict[str, Any]) -> Any:
        with _without_calls():
            return Functional.from_config(config)


@contextlib.contextmanager
def _without_calls() -> Iterator[None]:
    before = [(layer, layer._inbound_nodes) for layer in _shared_layers()]
    for layer, _ in before:
        layer._inbound_nodes = []
    try:
        yield
    finally:
        for layer in _shared_layers():
            layer._inbound_nodes = []
        for layer, nodes in before:
            layer._inbound_nodes = nodes


def _shared_layers() -> list[Any]:
    """Layers read so far that occur more than once; inputs have only the call that created them."""
    found = (global_state.get_global_attribute("shared_objects/id_to_obj_map") or {}).values()
    return [item for item in found if isinstance(item, keras.Operation) and not isinstance(item, InputLayer)]


def _is_foreign(kind: Any) -> bool:
    """Whether a class or function belongs neither to Keras nor to the libraries below it."""
    return (kind.__module__ or "").partition(".")[0] not in _LIBRARIES


def is_as_it_is(kind: type) -> bool:
    """Whether objects of a class are sent by state: custom classes without their own config."""
    return _is_foreign(kind) and not _has_own_config(kind) and not issubclass(kind, keras.optimizers.Optimizer)


def _has_own_config(kind: type) -> bool:
    method = getattr(kind, "get_config", None)
    return method is not None and _is_foreign(method)


def _name(item: Any, written: Written, stack: contextlib.ExitStack) -> None:
    """Registers a class or function under the name by which Keras will store it and look for it."""
    if any(item is known for known in written.objects.values()):
        return
    registered = GLOBAL_CUSTOM_NAMES.get(item)
    # A name that is not registered: registered names take precedence over those in a config.
    name = f"elasticcb>{len(written.objects)}>{'lambda' if item.__name__ == '<lambda>' else item.__name__}"
    written.objects[name] = item
    stack.callback(_restore_name, item, registered)
    GLOBAL_CUSTOM_NAMES[item] = name
    if isinstance(item, types.FunctionType) and item.__name__ == "<lambda>":
        # Keras would store its code without the globals and modules that it uses.
        stack.callback(setattr, item, "__name__", item.__name__)
        item.__name__ = name


def _restore_name(item: Any, registered: str | None) -> None:
    if registered is None:
        del GLOBAL_CUSTOM_NAMES[item]
    else:
        GLOBAL_CUSTOM_NAMES[item] = registered


def _replace_get_config(item: Any, function: Callable[[], Any], stack: contextlib.ExitStack) -> None:
    # Bypasses Keras's __setattr__, which tracks values.
    vars(item)["get_config"] = function
    stack.callback(vars(item).pop, "get_config")


def _reachable(root: Any) -> Iterator[Any]:
    """Keras objects in a structure, each before its parts; and functions and classes."""
    pending, seen = [root], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            pending.extend(item)
        elif isinstance(item, (types.FunctionType, type)):
            if _is_foreign(item):
                yield item
        elif isinstance(item, types.MethodType):
            if isinstance(item.__self__, _KERAS_TYPES) or not _is_foreign(type(item.__self__)):
                pending.append(item.__self__)
        elif isinstance(item, _KERAS_TYPES):
            yield item
            pending.extend(value for name, value in vars(item).items() if name not in layer_state.METHODS)
        elif type(item).__name__ == "SerializableDict":  # passed to `compile`
            pending.append(item.config)
            _check_methods(item.config)
        elif isinstance(item, functools.partial) or (callable(item) and _is_foreign(type(item))):
            yield item


def _check_methods(arguments: Any) -> None:
    for value in keras.tree.flatten(arguments):
        if isinstance(value, types.MethodType) and not isinstance(value.__self__, type):
            raise UsageError(
                f"`compile` was given the method {value.__qualname__} of an object, which can't be sent to workers "
                "without a second copy of the object. Pass a function, or override compute_loss or compute_metrics of "
                "the model."
            )


def _for_constructors(config: Any, written: Written) -> Any:
    """`config` without the keys that Keras adds for every layer ("trainable", "dtype") if the constructor of a custom
    class does not accept them: such a class works in `fit`, so it should work here."""
    if isinstance(config, (list, tuple)):
        return [_for_constructors(item, written) for item in config]
    if not isinstance(config, dict):
        return config
    config = {key: _for_constructors(value, written) for key, value in config.items()}
    name = config.get("registered_name") or ""
    kind = written.objects.get(name) if isinstance(name, str) and name not in written.as_it_is else None
    if isinstance(kind, type) and issubclass(kind, keras.layers.Layer) and isinstance(config.get("config"), dict):
        takes = inspect.signature(kind).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in takes.values()):
            config["config"] = {
                key: value
                for key, value in config["config"].items()
                if key in takes or key not in ("name", "trainable", "dtype")
            }
    return config
