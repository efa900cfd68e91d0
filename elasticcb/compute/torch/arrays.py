"""Converts between tensors and arrays, sharing memory where possible, and weights to and from their wire format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import torch

from elasticcb.compute.dense_batches import arrays_of
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.array_names import STATE, WEIGHTS, of_kind
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import VariableSpec, unpack


def array_of(tensor: torch.Tensor) -> Array:
    """The tensor's array, sharing its CPU memory: changes of one affect the other."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # not supported by NumPy
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array


def tensor_of(array: Array) -> torch.Tensor:
    """A copy of an array, on the device that Keras uses."""
    tensor: torch.Tensor = keras.ops.convert_to_tensor(array)
    return tensor


def tensors_of(batch: Any) -> Any:
    """A copy of a batch: PyTorch layers may modify their inputs. Raises the same errors as `arrays_of`."""
    return keras.tree.map_structure(tensor_of, arrays_of(batch), none_is_leaf=False)


def as_array(value: Any) -> Array:
    """A copy of a tensor, or of anything that NumPy accepts."""
    array: Array = keras.ops.convert_to_numpy(value)
    return array


def assign_weights(model: keras.Model, specs: Sequence[VariableSpec], weights: PlacedBlocks) -> None:
    """Sets the model to `weights`, without intermediate copies if its variables are in CPU memory."""
    apart: dict[int, Array] = {}
    targets: list[Array] = []
    for index, (variable, spec) in enumerate(zip(model.weights, specs, strict=True)):
        value, dtype = variable.value, dtype_of(spec.dtype)
        target = array_of(value) if value.device.type == "cpu" and value.is_contiguous() else None
        if target is None or target.dtype != dtype:
            target = apart[index] = np.empty(() if spec.table else spec.shape, dtype)
        targets.append(target)
    for server, slices in zip(weights, weights.partition, strict=True):
        unpack(of_kind(WEIGHTS, server), specs, slices, True, targets)
        unpack(of_kind(STATE, server), specs, slices, False, targets)
    for index, array in apart.items():
        if not specs[index].table:
            model.weights[index].assign(array)
