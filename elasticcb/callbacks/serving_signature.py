"""The inference signature of an exported model: features and outputs by name."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticcb.errors import CallbackError
from elasticcb.keras_private import layer_that_returns, layers_of

_AUTOMATIC_INPUT = re.compile(r"(input|input_layer|keras_tensor)(_\d+)?")


def add_serving_endpoint(archive: Any, model: keras.Model, features_spec: Any) -> None:
    """Adds the endpoint `serve`, and with it the signature `serving_default`, to a Keras `ExportArchive`.

    Args:
        archive: `keras.export.ExportArchive`.
        model: a built model.
        features_spec: structure of `tf.TensorSpec` of a batch of features, batch on axis 0; None: derived from the
            model's inputs.

    Raises:
        CallbackError: the shapes of the features are unknown, or they are not dense tensors.
    """
    spec = _signature(model, features_spec)

    def serve(features: Any) -> dict[str, Any]:
        return _named_outputs(model, model(features, training=False))

    if not isinstance(model, tf.__internal__.tracking.Trackable):  # a framework other than TensorFlow
        archive.track(model)
    # The archive finds TensorFlow variables that the endpoint uses, but in some releases not its tables.
    for table in _tables(model):
        archive.track(table)
    archive.add_endpoint("serve", serve, input_signature=[spec])


def serving_inputs(model: keras.Model, features_spec: Any) -> list[tf.TensorSpec]:
    """The named inputs of the signature that `add_serving_endpoint` adds. Raises the same errors."""
    return [spec for _, spec in _leaves(_signature(model, features_spec))]


def _signature(model: keras.Model, features_spec: Any) -> Any:
    """The structure of the model's features; each leaf is a `tf.TensorSpec` with its name in the signature."""
    inputs = list(getattr(model, "inputs", None) or [])
    if features_spec is None:
        features_spec = _spec_of_inputs(model, inputs)
    elif isinstance(features_spec, Mapping) and inputs:
        # A feed may return more features than the model takes; the signature omits the others.
        taken = {tensor.name: tensor for tensor in inputs}
        if taken.keys() <= features_spec.keys():
            features_spec = {
                name: _narrowed(features_spec[name], taken[name]) for name in features_spec if name in taken
            }
    elif isinstance(features_spec, tf.TensorSpec) and len(inputs) == 1:
        features_spec = _narrowed(features_spec, inputs[0])
    leaves = list(_leaves(features_spec))
    paths = [path for path, _ in leaves]
    if not any(paths) or not isinstance(features_spec, Mapping):
        # Tensors without keys get the names of the inputs if the user named these.
        for index, (path, _) in enumerate(leaves):
            name = inputs[index].name if len(inputs) == len(leaves) else ""
            automatic = not name or _AUTOMATIC_INPUT.fullmatch(name)
            paths[index] = "_".join(["features", *path.split()]) if automatic else name
    names = iter(_unique([_as_argument(path) for path in paths]))
    return _map_leaves(features_spec, lambda spec: _named(spec, next(names)))


def _narrowed(spec: Any, tensor: Any) -> Any:
    """`spec` with the sizes of the model's input: data may have one length where the model takes any."""
    shape = tf.TensorShape([None, *tensor.shape[1:]])
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != shape.rank or not shape.is_compatible_with(spec.shape):
        return spec
    return tf.TensorSpec(shape, spec.dtype, spec.name)


def _spec_of_inputs(model: keras.Model, inputs: Sequence[Any]) -> Any:
    def as_spec(tensor: Any) -> tf.TensorSpec:
        return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, name=tensor.name)

    if inputs:
        return _map_leaves(inputs[0] if isinstance(model, keras.Sequential) else model.input, as_spec)
    shapes = list((getattr(model, "_build_shapes_dict", None) or {}).values())
    if len(shapes) != 1:
        raise CallbackError(
            f"The shapes of the features of {type(model).__name__} are not known, so it can't be exported. "
            "Call the model on a batch once, use a functional model, or put the specs of "
            'the features into params["features_spec"].'
        )
    return _specs_of_shapes(shapes[0], model.input_dtype)


def _specs_of_shapes(shapes: Any, dtype: str) -> Any:
    if isinstance(shapes, Mapping):
        return {name: _specs_of_shapes(shape, dtype) for name, shape in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return tf.TensorSpec((None, *shapes[1:]), dtype)
    return [_specs_of_shapes(shape, dtype) for shape in shapes]


def _named(spec: Any, name: str) -> tf.TensorSpec:
    if not isinstance(spec, tf.TensorSpec):
        raise CallbackError(
            f"The inference signature takes dense tensors. Received for {name!r}: {spec!r}. Give dense tensors, "
            "for example by padding."
        )
    shape = spec.shape if spec.shape.rank in (None, 0) else [None, *spec.shape[1:]]
    return tf.TensorSpec(shape, spec.dtype, name=name)


def _leaves(structure: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with their paths (keys joined by blanks), in the order of `_map_leaves`."""
    if isinstance(structure, Mapping):
        items: Any = structure.items()
    elif isinstance(structure, (list, tuple)):
        items = enumerate(structure)
    else:
        yield path, structure
        return
    for key, value in items:
        yield from _leaves(value, f"{path} {key}".strip())


def _map_leaves(structure: Any, function: Any) -> Any:
    if isinstance(structure, Mapping):
        return {key: _map_leaves(value, function) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        values = [_map_leaves(value, function) for value in structure]
        return type(structure)(*values) if hasattr(structure, "_fields") else type(structure)(values)
    return function(structure)


def _as_argument(name: str) -> str:
    """`name` as TensorFlow converts it to an argument of a loaded signature: a Python name."""
    swapped = re.sub(r"[^0-9a-zA-Z]", "_", name)
    if not swapped[:1].isalpha():
        swapped = f"arg_{swapped}"
    return f"{swapped}_" if keyword.iskeyword(swapped) else swapped


def _unique(names: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    result = []
    for name in names:
        candidate, number = name, 0
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.add(candidate)
        result.append(candidate)
    return result


def _named_outputs(model: keras.Model, outputs: Any) -> dict[str, Any]:
    leaves = list(_leaves(outputs))
    if isinstance(outputs, Mapping):
        return {path.replace(" ", "_"): value for path, value in leaves}
    names = names_of_outputs(model)
    if len(names) != len(leaves):
        names = [""] if len(leaves) == 1 else [f"output_{index}" for index in range(len(leaves))]
    return dict(zip([name or "predictions" for name in names], (value for _, value in leaves), strict=True))


def names_of_outputs(model: keras.Model) -> list[str]:
    """The names that the user gave to the model's output layers, in the order of the outputs; for others `output_0`,
    `output_1`, …, and "" for an only output. Empty: the model has no symbolic outputs."""
    outputs = list(getattr(model, "outputs", None) or [])
    if len(outputs) == 1:
        return [_name_by_user(outputs[0])]
    return _unique([_name_by_user(output) or f"output_{index}" for index, output in enumerate(outputs)])


def _name_by_user(output: Any) -> str:
    """Name of the layer that produces `output`; "" if Keras generated it, because such names change between runs."""
    operation = layer_that_returns(output)
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(operation).__name__).lower()
    return "" if re.fullmatch(rf"{re.escape(snake)}(_\d+)?", operation.name) else operation.name


def _tables(model: keras.Model) -> list[Any]:
    """Lookup tables and other TensorFlow resources that are attributes of the model, its layers and modules."""
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[Any] = [*layers_of(model)]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, tf.saved_model.experimental.TrackableResource):
            found.append(thing)
        elif isinstance(thing, Mapping):
            pending.extend(thing.values())
        elif isinstance(thing, (list, tuple, set)):
            pending.extend(thing)
        elif isinstance(thing, (keras.layers.Layer, tf.Module)):
            pending.extend(vars(thing).values())
    return found
