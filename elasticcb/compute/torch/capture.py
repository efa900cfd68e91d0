"""Captures the gradients that a model's `train_step` passes to its optimizers, while PyTorch runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import torch

from elasticcb.compute.capture import OptimizerCapture, path_of, unchanged
from elasticcb.compute.refusals import assignment, late_read
from elasticcb.compute.torch.loss_scale import plain_gradient
from elasticcb.compute.torch.operations import Operations, is_view, memory_of, tells_nothing
from elasticcb.optimizers.variables import StepVariables


class TorchCapture(OptimizerCapture):
    """For the arguments, see `OptimizerCapture`."""

    def __init__(self, model: keras.Model, variables: Collection[int] | None = None, refuses: bool = True) -> None:
        super().__init__(model, WatchedReads(), variables, refuses)

    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
        return plain_gradient(optimizer, gradient)


class WatchedReads:
    """See `ReadWatch`. Watching is slow and steps are alike, so it watches only the first step."""

    def __init__(self) -> None:
        self._watches = True
        self._given: dict[int, tuple[str, str]] = {}  # (variable, optimizer) by the address of the variable's memory
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
            self._running.enter_context(Operations(self._note))
        for variable in variables:
            value = getattr(variable, "_value", variable)
            self._given[memory_of(value)] = path_of(variable), optimizer

    def _note(self, operation: Any, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        if not is_view(operation) and not tells_nothing(operation):
            self._found += [self._given[place] for place in map(memory_of, given) if place in self._given]


@contextlib.contextmanager
def refused_assignments(trainable: Sequence[keras.Variable]) -> Iterator[None]:
    """Refuses a step in the context that assigns to variables that servers update with gradients.

    Raises:
        ModelFileError: it assigns to one of them.
    """
    # PyTorch counts writes to each tensor's memory.
    before = [variable.value._version for variable in trainable]
    yield
    for variable, version in zip(trainable, before, strict=True):
        if variable.value._version != version:
            raise assignment(variable.path)


def step_variables(model: keras.Model, batch: Any, refuses: bool = True) -> StepVariables:
    """Which variables `train_step` gives to optimizers.

    The step is run, and the model is restored.
    """
    capture = TorchCapture(model, refuses=refuses)
    try:
        with unchanged(model.variables):
            _, updates = capture.train_step(batch)
    finally:
        capture.release()
    return StepVariables({index: update.optimizer for index, update in updates.items()}, capture.given)
