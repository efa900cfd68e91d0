"""Embedding layers whose rows may be stored elsewhere, how to redirect their lookups, and how to install rows from
servers into a native layer.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import ModelFileError
from elasticcb.keras_private import embeddings_of, layers_of
from elasticcb.layers.embedding import Embedding
from elasticcb.layers.ids import HeldIds
from elasticcb.rpc.tensors import Array
from elasticcb.tf.tensors import OF_TENSORFLOW, make_free_rows, make_whole, untouched_zeros


class NotServableError(ModelFileError):
    """Parameter servers can't hold the rows of an embedding layer because of how the model uses it."""


class TableLayer(Protocol):
    """An embedding layer of Keras or ElasticCB."""

    name: str
    path: str
    input_dim: int | None
    output_dim: int
    _embeddings: keras.Variable


Lookup = Callable[[Any], Any]  # rows [..., dim] of int64 ids [...]

_NATIVE = keras.layers.Embedding


def table_layers(model: keras.Model) -> dict[int, list[TableLayer]]:
    """The embedding layers of a built model, by the index of their variable in `model.weights`.

    Layers of both kinds, at any depth; of Keras's, only those that look up rows as Keras does.
    """
    indices = {id(variable): index for index, variable in enumerate(model.weights)}
    found: dict[int, list[TableLayer]] = {}
    for layer in layers_of(model):
        index = indices.get(id(getattr(layer, "_embeddings", None)))
        if index is not None and (is_own(layer) or _looks_up_as_keras(layer)):
            found.setdefault(index, []).append(layer)
    return found


def is_own(layer: Any) -> TypeGuard[Embedding]:
    return isinstance(layer, Embedding)


def _looks_up_as_keras(layer: Any) -> bool:
    kind = type(layer)
    return isinstance(layer, _NATIVE) and all(
        getattr(kind, name) is getattr(_NATIVE, name) for name in ("call", "build", "embeddings", "compute_mask")
    )


def answer(layer: Any, lookup: Lookup) -> None:
    """Redirects the layer's lookups to `lookup`, until `stop_answering`."""
    # Around Keras's __setattr__, which tracks what it is given.
    vars(layer).update({"_lookup": lookup} if is_own(layer) else {"call": _keras_call(layer, lookup)})


def stop_answering(layer: Any) -> None:
    vars(layer).pop("_lookup" if is_own(layer) else "call", None)


@contextlib.contextmanager
def answered(layers: Mapping[int, TableLayer], lookup: Callable[[int, Any], Any]) -> Iterator[None]:
    """Context in which `lookup` answers the lookups of layers, by their index."""
    for index, layer in layers.items():
        answer(layer, functools.partial(lookup, index))
    try:
        yield
    finally:
        for layer in layers.values():
            stop_answering(layer)


@contextlib.contextmanager
def without_rows(model: keras.Model) -> Iterator[None]:
    """Context in which all rows of `elasticcb.layers` are zeros: for steps of which only shapes matter. Unlike the
    layer itself, it accepts ids that the backend's integers can't represent."""
    layers = [layer for layer in layers_of(model) if is_own(layer)]

    def zeros(index: int, ids: Any) -> Any:
        return keras.ops.zeros((*ids.shape, layers[index].output_dim), dtype=layers[index].variable_dtype)

    with answered(dict(enumerate(layers)), zeros):
        yield


def _keras_call(layer: Any, lookup: Lookup) -> Callable[[Any], Any]:
    """`keras.layers.Embedding.call`, with the same results."""

    def rows(ids: Any) -> Any:
        # To Keras, -1 is the last row.
        return keras.ops.cast(lookup(keras.ops.where(ids < 0, ids + layer.input_dim, ids)), layer.compute_dtype)

    def call(inputs: Any) -> Any:
        if not OF_TENSORFLOW:
            ids = keras.ops.convert_to_tensor(inputs)
            return rows(ids if "int" in keras.backend.standardize_dtype(ids.dtype) else keras.ops.cast(ids, "int32"))
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(rows(tf.cast(inputs.flat_values, tf.int64)))
        if isinstance(inputs, tf.SparseTensor):  # what is absent is row 0
            inputs = tf.sparse.to_dense(tf.sparse.reorder(inputs))
        return rows(tf.cast(inputs, tf.int64))

    return call


def empty(layer: TableLayer) -> None:
    """Empties a layer, and lets it hold any number of rows from now on."""
    if is_own(layer):
        layer.set_rows([])
    else:
        make_free_rows(embeddings_of(layer))


def make_native(layer: TableLayer, shape: tuple[int, ...]) -> None:
    """Undoes this: the layer has no rows (elasticcb.layers), or all rows are zero (Keras's)."""
    if is_own(layer):
        layer.set_rows([])
    else:
        make_whole(embeddings_of(layer), untouched_zeros(shape, embeddings_of(layer).dtype))


def install(model: keras.Model, index: int, ids: Array, rows: Array, used: Array | None = None) -> None:
    """Sets the rows of an embedding layer of `model` that is not served.

    It does not allocate memory for the table if the ids are in order (and complete, for a keras.layers.Embedding) and
    `rows` is an np.memmap: the variable shares it. Neither array may be changed afterwards.

    Args:
        ids: int64 [n], unique.
        rows: [n, dim]. Missing rows of a keras.layers.Embedding become zero.
        used: the version at which each row was last trained, int64 [n], if known; the ids must then be in order.

    Raises:
        ModelFileError: there is no such embedding layer.
    """
    layers = table_layers(model).get(index)
    if not layers:
        raise ModelFileError(f"{model.weights[index].path!r} is not the variable of an embedding layer.")
    layer = layers[0]
    if is_own(layer):
        layer.hold(ids, rows)
        layer.used = used
        return
    variable = embeddings_of(layer)
    shape = tuple(variable.shape)
    if len(ids) != shape[0] or not np.array_equal(ids, np.arange(len(ids))):
        whole = untouched_zeros(shape, variable.dtype)
        whole[ids] = rows
        rows = whole
    make_whole(variable, rows)


def rows_in(model: keras.Model) -> list[Any]:
    """The variables and arrays of a model's `elasticcb.layers.Embedding` that have one row for each id."""
    own = [layer for layers in table_layers(model).values() for layer in layers if is_own(layer)]
    found = [each for layer in own for each in (embeddings_of(layer), layer._ids, layer.used)]
    return [each.numpy() if isinstance(each, HeldIds) else each for each in found if each is not None]


def held_ids(model: keras.Model, index: int) -> Array | None:
    """The ids of the rows of an embedding layer's variable, int64 [n]; None for 0, 1, …."""
    layer = table_layers(model)[index][0]
    return layer.rows()[0] if is_own(layer) else None


def held_used(model: keras.Model, index: int) -> Array | None:
    """The versions at which a job last trained the rows of an embedding layer, int64 [n]; None: unknown."""
    layer = table_layers(model)[index][0]
    return layer.used if is_own(layer) else None
