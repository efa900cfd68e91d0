"""Gives a native layer the rows that servers held."""

from __future__ import annotations

import keras
import numpy as np

from elasticcb.errors import ModelFileError
from elasticcb.layers.table_layers import TableLayer, is_own, table_layers
from elasticcb.rpc.tensors import Array
from elasticcb.tf.row_variables import make_free_rows, make_whole, untouched_zeros


def empty(layer: TableLayer) -> None:
    """Lets a layer hold no rows, and any number of them from now on."""
    if is_own(layer):
        layer.set_rows([])
    else:
        make_free_rows(layer._embeddings)


def make_native(layer: TableLayer, shape: tuple[int, ...]) -> None:
    """Ends that: with no rows (elasticcb.layers), or with all rows zero (Keras's).

    Args:
        shape: what its variable had before.
    """
    if is_own(layer):
        layer.set_rows([])
    else:
        make_whole(layer._embeddings, untouched_zeros(shape, layer._embeddings.dtype))


def install(model: keras.Model, index: int, ids: Array, rows: Array, used: Array | None = None) -> None:
    """Gives an embedding layer of `model`, served by nobody, its rows.

    No memory of the table's size is needed where the ids are in order, and all there for a keras.layers.Embedding, and
    `rows` is of a file (np.memmap): the variable shares it. Neither array may be changed afterwards.

    Args:
        index: of the layer's variable in `model.weights`.
        ids: int64 [n], unique.
        rows: [n, dim]. Rows of a keras.layers.Embedding that are not given become zero.
        used: the version at which each was last trained, int64 [n], if that is known; the ids are in order then.

    Raises:
        ModelFileError: there is no such embedding layer.
    """
    layers = table_layers(model).get(index)
    if not layers:
        raise ModelFileError(f"{model.weights[index].path!r} is no variable of an embedding layer.")
    layer = layers[0]
    if is_own(layer):
        layer.hold(ids, rows)
        layer.used = used
        return
    variable = layer._embeddings
    shape = tuple(variable.shape)
    if len(ids) != shape[0] or not np.array_equal(ids, np.arange(len(ids))):
        whole = untouched_zeros(shape, variable.dtype)
        whole[ids] = rows
        rows = whole
    make_whole(variable, rows)


def held_ids(model: keras.Model, index: int) -> Array | None:
    """The ids that the rows of an embedding layer's variable are of, int64 [n]; None for 0, 1, …."""
    layer = table_layers(model)[index][0]
    return layer.rows()[0] if is_own(layer) else None


def held_used(model: keras.Model, index: int) -> Array | None:
    """When a job last trained the rows that an embedding layer holds: versions, int64 [n]; None: nobody knows."""
    layer = table_layers(model)[index][0]
    return layer.used if is_own(layer) else None
