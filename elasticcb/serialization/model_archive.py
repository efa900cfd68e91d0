"""A Keras model as bytes, without its weights, which the parameter servers hold.

The archive has the configs of layers, losses, metrics and optimizers, the objects that these refer to
(keras_config.py), the state of preprocessing layers after `adapt`, and which layers are frozen.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import types
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elasticcb.errors import UsageError
from elasticcb.serialization import keras_config, layer_state, pickling

_NAME = "The model's own classes and functions"


def save_model(model: keras.layers.Layer) -> bytes:
    """The architecture of a built model or layer, its compile arguments, and the state of its layers after `adapt`.

    Raises:
        UsageError: Keras can't serialize it.
    """
    own_way = _compiles_in_its_own_way(model)
    attributes = _compiled_attributes(model) if own_way else {}
    try:
        with warnings.catch_warnings(), _whole_compile_config(model):
            warnings.filterwarnings("ignore", message="The object being serialized includes a `lambda`")
            written = keras_config.write(model, attributes)
    except UsageError:
        raise
    except Exception as error:  # any error of a user's get_config
        raise UsageError(
            f"The model can't be sent to the workers: Keras can't serialize it: {type(error).__name__}: {error}\n"
            "Add a get_config() that returns the arguments of __init__ to its class (and those of its layers). "
            "Or write a model file, whose custom_model() is called in every process: `elasticcb train --help`."
        ) from error
    compiled = written.config.pop("compile_config", None) or None
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        learning = {str(id(layer)): layer for layer in model._flatten_layers() if _learns(layer)}
        saved = {
            "written": written,
            "compile": compiled,
            "attributes": attributes,
            "frozen": _trainable(model),
            "learned": list(learning),
        }
        archive.writestr("model", pickling.dumps(saved, _NAME, model, refers=False))
        for number, layer in learning.items():
            _save_layer(archive, f"layers/{number}", layer)
    return buffer.getvalue()


def restore_model(data: bytes) -> Any:
    """The model saved by `save_model`, with initial weights."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        saved = pickling.loads(archive.read("model"))
        written = saved["written"]
        with warnings.catch_warnings():
            # About layers that are built by their first call, which follows.
            warnings.filterwarnings("ignore", message="`build\\(\\)` was called on layer")
            layers: dict[int, Any] = {}
            model = keras_config.read(written, layers)
        for number, layer in layers.items():
            if str(number) in saved["learned"]:
                _restore_layer(archive, f"layers/{number}", layer)
        _set_trainable(model, layers, saved["frozen"])
        if saved["compile"] is not None:
            with keras.saving.custom_object_scope(keras_config.names(written)):
                _compile(model, saved["compile"], saved["attributes"])
    return model


# ---------------------------------------------------------------- frozen layers


def _trainable(model: keras.layers.Layer) -> tuple[dict[int, bool], list[bool]]:
    """The `trainable` flags of layers and of weights, which are independent."""
    return {id(layer): layer._trainable for layer in model._flatten_layers()}, [
        getattr(variable, "_trainable", True) for variable in model.weights
    ]


def _set_trainable(model: Any, layers: dict[int, Any], trainable: tuple[dict[int, bool], list[bool]]) -> None:
    for number, value in trainable[0].items():
        if number in layers:
            layers[number]._trainable = value
    if len(model.weights) == len(trainable[1]):
        for variable, value in zip(model.weights, trainable[1], strict=True):
            variable.trainable = value


# ---------------------------------------------------------------- state after `adapt`


def _learns(layer: keras.layers.Layer) -> bool:
    return hasattr(layer, "adapt") or hasattr(layer, "save_assets")


def _save_layer(archive: zipfile.ZipFile, name: str, layer: keras.layers.Layer) -> None:
    values: dict[str, Any] = {}
    layer.save_own_variables(values)
    arrays: dict[str, Any] = {key: np.asarray(value) for key, value in values.items()}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
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


# ---------------------------------------------------------------- compile arguments


def _compiles_in_its_own_way(model: keras.layers.Layer) -> bool:
    """Whether the class has its own `compile`, without a config from which Keras could call it again."""
    kind = type(model)
    return (
        isinstance(model, keras.Model)
        and model.compiled
        and kind.compile is not keras.Model.compile
        and kind.compile_from_config is keras.Model.compile_from_config
    )


@contextlib.contextmanager
def _whole_compile_config(model: Any) -> Iterator[None]:
    """Adds what Keras keeps of an earlier `compile` where the last one had no loss or no metrics."""
    config = getattr(model, "_compile_config", None)
    if config is None:
        yield
        return
    before, own = config.config, dict(config.config)
    if own.get("loss") is None and model._compile_loss is not None:
        loss = model._compile_loss
        own |= {"loss": loss._user_loss, "loss_weights": loss._user_loss_weights}
    if own.get("metrics") is None and own.get("weighted_metrics") is None and model._compile_metrics is not None:
        kept = model._compile_metrics
        own |= {"metrics": kept._user_metrics, "weighted_metrics": kept._user_weighted_metrics}
    config.config = own
    try:
        yield
    finally:
        config.config = before


def _compiled_attributes(model: keras.Model) -> dict[str, Any]:
    """Attributes that such a `compile` may have set: optimizers, losses, metrics, functions and plain values."""
    plain = (bool, int, float, str, types.FunctionType)
    kinds = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer, *plain)
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, kinds) and name not in layer_state.own_names() and not hasattr(keras.Model, name)
    }


def _compile(model: keras.Model, config: dict[str, Any], attributes: dict[str, Any]) -> None:
    if type(model).compile_from_config is not keras.Model.compile_from_config:
        model.compile_from_config(config)
        return
    # Not Keras's own compile_from_config, which creates the optimizer's slots: these are on the servers.
    arguments = keras.saving.deserialize_keras_object(config, safe_mode=False)
    if type(model).compile is keras.Model.compile:
        model.compile(**arguments)
        return
    keras.Model.compile(model, **arguments)
    for name, value in attributes.items():
        if getattr(model, name, None) is None:
            setattr(model, name, value)


# ---------------------------------------------------------------- models within pickled objects


def _reduce(layer: keras.layers.Layer) -> Any:
    return _restore_with_weights, (save_model(layer), [variable.numpy() for variable in layer.weights])


def _restore_with_weights(data: bytes, values: list[Any]) -> Any:
    layer = restore_model(data)
    if values:
        layer.set_weights(values)
    return layer


pickling.register(keras.layers.Layer, _reduce)
