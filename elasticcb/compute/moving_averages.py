"""Which non-trainable variables are moving averages, and how much of the old value a step keeps."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import keras

from elasticcb.keras_private import layers_of


class MovingAverages:
    """The moving averages of a model's BatchNormalization layers.

    A layer called several times in a step updates its averages as often, which is only known from the step.
    """

    def __init__(self, model: keras.Model) -> None:
        indices = {id(variable): index for index, variable in enumerate(model.weights)}
        self._momentum: dict[int, float] = {}  # by index in `model.weights`
        self._calls: Counter[int] = Counter()
        self._thread: int | None = None  # the counting thread; another thread may trace the step to find its lookups
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
                for variable in (layer.moving_mean, layer.moving_variance):
                    if id(variable) in indices:
                        self._watch(variable, indices[id(variable)], float(layer.momentum))

    def _watch(self, variable: Any, index: int, momentum: float) -> None:
        self._momentum[index] = momentum
        assign = type(variable).assign

        def counting(value: Any) -> Any:
            if self._thread == threading.get_ident():
                self._calls[index] += 1
            return assign(variable, value)

        variable.assign = counting

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts updates of a step that is traced or run inside the context."""
        self._calls.clear()
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    @property
    def decays(self) -> dict[int, float]:
        """By index in `model.weights`: how much of its old value each variable keeps after the last counted step."""
        return {
            index: momentum ** self._calls[index] for index, momentum in self._momentum.items() if self._calls[index]
        }
