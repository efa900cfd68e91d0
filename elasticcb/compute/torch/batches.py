"""Batches of the input pipeline as tensors of PyTorch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

from elasticcb.compute.torch.arrays import tensor_of
from elasticcb.errors import ModelFileError

_COMPOSITE = {
    "RaggedTensor": "Make it dense in `feed`, with padding: `to_tensor()`; with mask_zero, 0 counts as padding.",
    "SparseTensor": "Make it dense in `feed`: tf.sparse.to_dense.",
}


def batch_tensors(data: Any) -> Any:
    """A batch, copied: layers of PyTorch may write to what they are given.

    Raises:
        ModelFileError: it holds what PyTorch has no tensors for.
    """
    return keras.tree.map_structure(_tensor, data, none_is_leaf=False)


def _tensor(value: Any) -> torch.Tensor:
    kind = type(value).__name__
    if kind in _COMPOSITE:
        raise ModelFileError(f"A batch holds a {kind}, which Keras does not take on PyTorch. {_COMPOSITE[kind]}")
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        raise ModelFileError(
            "A batch holds strings, which PyTorch has no tensors for. Turn them into numbers in `feed`: "
            "keras.layers.StringLookup and keras.layers.Hashing work there, within `map` of the dataset."
        )
    return tensor_of(array)
