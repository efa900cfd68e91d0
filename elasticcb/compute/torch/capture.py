"""What a model's `train_step` hands to its optimizers, while PyTorch runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elasticcb.compute.capture import OptimizerCapture, unchanged
from elasticcb.compute.refusals import assignment, late_read
from elasticcb.compute.torch.loss_scale import plain_gradient


class TorchCapture(OptimizerCapture):
    """For the arguments see `OptimizerCapture`."""

    def __init__(self, model: keras.Model, variables: Collection[int] | None = None, refuses: bool = True) -> None:
        super().__init__(model, WatchedReads(), variables, refuses)

    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
        return plain_gradient(optimizer, gradient)


class WatchedReads:
    """For what it does see `ReadWatch`. Watching costs time, and steps are alike, so it watches the first step only."""

    def __init__(self) -> None:
        self._watches = True
        self._given: dict[int, tuple[str, str]] = {}  # (variable, optimizer) by where the variable's memory is
        self._found: list[tuple[str, str]] = []
        self._running = contextlib.ExitStack()

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        self._given.clear()
        self._found.clear()
        with self._running:
            yield
        if self._given:
            self._watches = False
        if self._found:
            raise late_read(self._found)

    def given(self, variables: Sequence[Any], optimizer: str) -> None:
        if not self._watches:
            return
        if not self._given:
            self._running.enter_context(_Operations(self._note))
        for variable in variables:
            value = getattr(variable, "_value", variable)
            path = str(getattr(variable, "path", None) or variable.name)
            self._given[value.untyped_storage().data_ptr()] = path, optimizer

    def _note(self, function: Any, tensors: Iterable[torch.Tensor]) -> None:
        if function in _NO_READS:
            return
        places = (tensor.untyped_storage().data_ptr() for tensor in tensors)
        self._found += [self._given[place] for place in places if place in self._given]


# What tells nothing of a value that it is given: `detach` gives another name to it. Reads of that are seen themselves.
_NO_READS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default}


class _Operations(TorchDispatchMode):
    """Tells of each operation that runs in the context, and of the tensors that it is given."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self._note_operation = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        self._note_operation(func, [value for value in given if isinstance(value, torch.Tensor)])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def refused_assignments(trainable: Sequence[keras.Variable]) -> Iterator[None]:
    """Refuses a step in the context that assigns to variables that servers update with gradients.

    Raises:
        ModelFileError: it assigns to one of them.
    """
    # PyTorch counts how often the memory of a tensor was written to.
    before = [variable.value._version for variable in trainable]
    yield
    for variable, version in zip(trainable, before, strict=True):
        if variable.value._version != version:
            raise assignment(variable.path)


def updated_variables(model: keras.Model, batch: Any, refuses: bool = True) -> dict[int, int]:
    """Which variables `train_step` updates: by index in `model.weights`, the index of the optimizer.

    The step is run, and leaves the model as it was.

    Args:
        refuses: as of `OptimizerCapture`.
    """
    capture = TorchCapture(model, refuses=refuses)
    try:
        with unchanged(model.variables):
            _, updates = capture.train_step(batch)
    finally:
        capture.release()
    return {index: update.optimizer for index, update in updates.items()}
