"""A Keras model as bytes, without its weights: those are the parameter servers'.

Keras serializes layers, losses, metrics and optimizers by class and config. Beside that travel: the classes and
functions that Keras finds by name alone (`custom_objects`), and what preprocessing layers have learned by `adapt`.
"""

from __future__ import annotations

import inspect
import io
import json
import tempfile
import types
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np

from elasticcb.errors import UsageError

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
_LIBRARIES = {"keras", "tensorflow", "numpy", "builtins"}


def custom_objects(root: Any) -> dict[str, Any]:
    """Classes and functions below a Keras object that Keras itself does not bring, by the name that it looks for."""
    found: dict[str, Any] = {}
    for item in _reachable(root):
        kind = item if isinstance(item, (types.FunctionType, type)) else type(item)
        if (kind.__module__ or "").partition(".")[0] not in _LIBRARIES and not _is_lambda(kind):
            found[keras.saving.get_registered_name(kind)] = kind
            found.setdefault(kind.__name__, kind)
    return found


def _is_lambda(kind: Any) -> bool:
    return kind.__name__ == "<lambda>"  # Keras serializes the code of those


def _reachable(root: Any) -> Iterator[Any]:
    """Keras objects, and functions and classes that they hold."""
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
            yield item
        elif isinstance(item, types.MethodType):
            pending.append(item.__self__)
        elif isinstance(item, _KERAS_TYPES):
            yield item
            # Not the methods that Keras wraps: the wrapper holds the layer, which is no function to be found by name.
            wrapped = ("build", "quantize")
            pending.extend(value for name, value in vars(item).items() if name not in wrapped)
        elif type(item).__name__ == "SerializableDict":  # what `compile` was given
            pending.append(item.config)


def save_model(model: keras.Model) -> bytes:
    """The architecture of a built model, how it is compiled, and what its layers have learned by `adapt`.

    Raises:
        UsageError: Keras can't serialize it.
    """
    try:
        config = _for_constructors(keras.saving.serialize_keras_object(model), custom_objects(model))
        compiled = config.pop("compile_config", None) or None
        text = json.dumps({"model": config, "compile": compiled})
    except Exception as error:  # whatever a get_config of the user's raises
        raise UsageError(
            f"The model can't be sent to the workers, since Keras can't serialize it: {type(error).__name__}: {error}\n"
            "Give its class (and those of its layers) a get_config() that returns the arguments of __init__. "
            "Or write a model file, whose custom_model() is called in every process: `elasticcb train --help`."
        ) from error
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("config.json", text)
        for index, layer in _learning_layers(model):
            _save_layer(archive, f"layers/{index}", layer)
        if _compiles_in_its_own_way(model):
            archive.writestr("attributes", cloudpickle.dumps(_compiled_attributes(model)))
    return buffer.getvalue()


def _for_constructors(config: Any, classes: dict[str, Any]) -> Any:
    """`config` without what Keras adds for every layer ("trainable", "dtype") where the constructor of a class of the
    user's does not take it: such a class works in `fit`, and so it should here."""
    if isinstance(config, (list, tuple)):
        return [_for_constructors(item, classes) for item in config]
    if not isinstance(config, dict):
        return config
    config = {key: _for_constructors(value, classes) for key, value in config.items()}
    kind = classes.get(config.get("registered_name") or "")
    if isinstance(kind, type) and issubclass(kind, keras.layers.Layer) and isinstance(config.get("config"), dict):
        takes = inspect.signature(kind.__init__).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in takes.values()):
            config["config"] = {
                key: value
                for key, value in config["config"].items()
                if key in takes or key not in ("name", "trainable", "dtype")
            }
    return config


def restore_model(data: bytes, objects: bytes = b"", compile: bool = True) -> keras.Model:
    """The model that `save_model` saved, with initial weights.

    Args:
        objects: `custom_objects`, pickled.
        compile: False leaves it uncompiled, to predict with.
    """
    custom: dict[str, Any] = cloudpickle.loads(objects) if objects else {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        saved = json.loads(archive.read("config.json"))
        with keras.saving.custom_object_scope(custom):
            with warnings.catch_warnings():
                # It tells of layers that are built by their first call; that one follows.
                warnings.filterwarnings("ignore", message="`build\\(\\)` was called on layer")
                model = keras.saving.deserialize_keras_object(saved["model"], safe_mode=False)
            for index, layer in _learning_layers(model):
                _restore_layer(archive, f"layers/{index}", layer)
            if compile and saved["compile"] is not None:
                _compile(model, saved["compile"], archive)
    return model


# ---------------------------------------------------------------- what layers learn by `adapt`


def _learning_layers(model: keras.Model) -> Iterator[tuple[int, keras.layers.Layer]]:
    for index, layer in enumerate(model._flatten_layers()):
        if hasattr(layer, "adapt") or hasattr(layer, "save_assets"):
            yield index, layer


def _save_layer(archive: zipfile.ZipFile, name: str, layer: keras.layers.Layer) -> None:
    values: dict[str, Any] = {}
    layer.save_own_variables(values)
    buffer = io.BytesIO()
    np.savez(buffer, **{key: np.asarray(value) for key, value in values.items()})
    archive.writestr(f"{name}/variables.npz", buffer.getvalue())
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(layer, "save_assets"):
            layer.save_assets(folder)
        for path in Path(folder).rglob("*"):
            if path.is_file():
                archive.write(path, f"{name}/assets/{path.relative_to(folder)}")


def _restore_layer(archive: zipfile.ZipFile, name: str, layer: keras.layers.Layer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder, name, "assets")
        assets.mkdir(parents=True)
        archive.extractall(folder, [entry for entry in archive.namelist() if entry.startswith(f"{name}/assets/")])
        if hasattr(layer, "load_assets"):
            layer.load_assets(str(assets))
    if f"{name}/variables.npz" in archive.namelist():
        with np.load(io.BytesIO(archive.read(f"{name}/variables.npz"))) as values:
            if values.files:
                layer.load_own_variables(dict(values))


# ---------------------------------------------------------------- how it is compiled


def _compiles_in_its_own_way(model: keras.Model) -> bool:
    """Whether the class has a `compile` of its own, and nothing that tells Keras how to call it again."""
    kind = type(model)
    return (
        model.compiled
        and kind.compile is not keras.Model.compile
        and kind.compile_from_config is keras.Model.compile_from_config
    )


def _compiled_attributes(model: keras.Model) -> dict[str, Any]:
    """What such a `compile` may have set: optimizers, losses, metrics, functions and plain values."""
    plain = (bool, int, float, str, types.FunctionType)
    kept: dict[str, Any] = {}
    for name, value in vars(model).items():
        if name.startswith("_") or hasattr(keras.Model, name):
            continue
        if isinstance(value, (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)):
            kept[name] = _Serialized(keras.saving.serialize_keras_object(value), custom_objects(value))
        elif isinstance(value, plain):
            kept[name] = value
    return kept


class _Serialized:
    def __init__(self, config: Any, objects: dict[str, Any]) -> None:
        self._config, self._objects = config, objects

    def restore(self) -> Any:
        return keras.saving.deserialize_keras_object(self._config, custom_objects=self._objects, safe_mode=False)


def _compile(model: keras.Model, config: dict[str, Any], archive: zipfile.ZipFile) -> None:
    if type(model).compile_from_config is not keras.Model.compile_from_config:
        model.compile_from_config(config)
        return
    # Not Keras's own compile_from_config, which makes the optimizer's slots: they are on the servers.
    arguments = keras.saving.deserialize_keras_object(config, safe_mode=False)
    if "attributes" not in archive.namelist():
        model.compile(**arguments)
        return
    keras.Model.compile(model, **arguments)
    for name, value in cloudpickle.loads(archive.read("attributes")).items():
        if getattr(model, name, None) is None:
            setattr(model, name, value.restore() if isinstance(value, _Serialized) else value)
