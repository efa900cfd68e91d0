"""Observes the PyTorch operations that a piece of code runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # there is no public API to observe each operation

# Called with an operation, its input tensors, and its outputs.
Note = Callable[[Any, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Operations(TorchDispatchMode):
    """Reports each operation in the context, including those that compute gradients."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, _tensors((args, kwargs)), _tensors(result))
        return result


def memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory: the same for views."""
    return int(tensor.untyped_storage().data_ptr())


def tells_nothing(operation: Any) -> bool:
    """Whether an operation's result does not depend on its inputs' values, like a shape."""
    return operation.overloadpacket in _SHAPES


def is_view(operation: Any) -> bool:
    """Whether it only creates a view of its input's memory, without reading it."""
    return operation.overloadpacket in _NAMES


def is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(structure) if isinstance(value, torch.Tensor)]


_SHAPES = {
    torch.ops.aten.zeros_like, torch.ops.aten.ones_like, torch.ops.aten.full_like, torch.ops.aten.empty_like,
    torch.ops.aten.new_zeros, torch.ops.aten.new_ones, torch.ops.aten.new_full, torch.ops.aten.new_empty,
}  # fmt: skip
_NAMES = {torch.ops.aten.detach, torch.ops.aten.alias}
