"""Installs rows from servers into a native layer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from elasticcb.errors import ModelFileError
from elasticcb.keras_private import embeddings_of
from elasticcb.layers.ids import HeldIds
from elasticcb.layers.table_layers import TableLayer, is_own, table_layers
from elasticcb.rpc.tensors import Array
from elasticcb.tf.tensors import make_free_rows, make_whole, untouched_zeros


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
