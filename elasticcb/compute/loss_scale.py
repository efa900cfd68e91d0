"""Loss scaling like Keras's optimizers: a fixed factor, or the dynamic scale of `LossScaleOptimizer`.

Each worker scales its own loss with its own dynamic scale: it is neither shared with other workers nor checkpointed,
and a new worker starts with `initial_scale`. Servers get gradients of the plain loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from elasticcb.compute.capture import Update


class LossScale(ABC):
    """The scale of one optimizer's loss.

    Args:
        optimizer: optimizer of the model; the model's `train_step` calls its `scale_loss`.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer = optimizer
        self.dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if self.dynamic and not optimizer.built:
            # Like `build`, but without the inner optimizer's slots, which only servers need.
            optimizer.step_counter = keras.Variable(0, dtype="int64", trainable=False, name="step_counter")
            optimizer.dynamic_scale = keras.Variable(
                optimizer.initial_scale, dtype="float32", trainable=False, name="dynamic_scale"
            )
            optimizer.built = True

    @abstractmethod
    def unscale(self, gradients: dict[int, Any]) -> tuple[dict[int, Any], Any]:
        """Gradients of the plain loss, and whether they are usable: always True without a dynamic scale, or gradients.

        If they are unusable (some are not finite), the scale is halved. After `dynamic_growth_steps` usable steps it is
        doubled.
        """

    @property
    def value(self) -> float:
        """The dynamic scale."""
        return float(self.optimizer.dynamic_scale.numpy())


def unscaled(scales: Sequence[LossScale], updates: Mapping[int, Update]) -> tuple[dict[int, Any], list[Any]]:
    """Gradients of the plain loss, by variable; and by optimizer whether they are usable, as in `LossScale.unscale`."""
    gradients: dict[int, Any] = {}
    usable = []
    for number, scale in enumerate(scales):
        own = {index: update.gradient for index, update in updates.items() if update.optimizer == number}
        plain, fits = scale.unscale(own)
        gradients |= plain
        usable.append(fits)
    return gradients, usable


def explain_overflow(scales: Iterable[tuple[LossScale, Any]]) -> str:
    """Why gradients are unusable; "" if they are usable."""
    return ", ".join(
        f"gradients of the scaled loss are not finite; {scale.optimizer.name!r} lowers its scale to {scale.value:g}"
        for scale, usable in scales
        if not usable
    )
