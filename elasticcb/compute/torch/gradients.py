"""Converts the gradients of a step for a push: rows summed, clipped, as arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from elasticcb.compute.backend import RowGradients
from elasticcb.compute.clipping import Clipping
from elasticcb.compute.torch.arrays import array_of, as_array
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.partition import VariableSpec


def sort_gradients(
    gradients: Mapping[int, torch.Tensor],
    specs: Sequence[VariableSpec],
    clipped: Sequence[Clipping],
    table_ids: Mapping[int, Array] = MappingProxyType({}),
) -> tuple[dict[int, Array], RowGradients]:
    """Dense gradients and gradients of rows, by variable, in the variables' dtypes.

    Dense ones share the gradients' memory.

    Args:
        table_ids: of embedding tables, by variable: ids of the rows given to the step.
    """
    found = {i: gradients[i].coalesce() if gradients[i].is_sparse else gradients[i] for i in sorted(gradients)}
    for clipping in clipped:
        factor = _clipping_factor([found[index] for index in found if index in clipping.variables], clipping.norm)
        found.update({index: found[index] * factor for index in found if index in clipping.variables})
    dense, rows = {}, {}
    for index, gradient in found.items():
        dtype = dtype_of(specs[index].dtype)
        if index in table_ids:
            rows[index] = table_ids[index], array_of(gradient).astype(dtype, copy=False)
        elif gradient.is_sparse and gradient.sparse_dim() == 1:
            rows[index] = as_array(gradient.indices()[0]), as_array(gradient.values()).astype(dtype, copy=False)
        else:
            dense[index] = array_of(gradient.to_dense()).astype(dtype, copy=False)
    return dense, rows


def _clipping_factor(gradients: Collection[torch.Tensor], limit: float) -> Any:
    if not gradients:
        return 1.0
    norms = [(each.values() if each.is_sparse else each).float().norm() for each in gradients]
    norm = torch.stack(norms).norm()
    # If the norm is not finite, all are set to NaN, so that no finite result can hide it.
    return limit / torch.clamp(norm, min=limit) + (norm - norm)
