"""Loss scaling, as Keras's optimizers do it: a fixed factor, or the dynamic scale of `LossScaleOptimizer`.

Each worker scales its own loss, so the dynamic scale is its own too: it is neither shared with other workers nor
part of a checkpoint, and a worker that starts begins with `initial_scale`. Servers get gradients of the plain loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import keras


class LossScale(ABC):
    """The scale of one optimizer's loss.

    Args:
        optimizer: of the model; its `scale_loss` is what the model's `train_step` calls.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer = optimizer
        self.dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if self.dynamic and not optimizer.built:
            # What `build` makes, without the inner optimizer's slots, which only servers need.
            optimizer.step_counter = keras.Variable(0, dtype="int64", trainable=False, name="step_counter")
            optimizer.dynamic_scale = keras.Variable(
                optimizer.initial_scale, dtype="float32", trainable=False, name="dynamic_scale"
            )
            optimizer.built = True

    @abstractmethod
    def unscale(self, gradients: dict[int, Any]) -> tuple[dict[int, Any], Any]:
        """Gradients of the plain loss, and whether they can be used: true without a dynamic scale.

        Where they can't, some are not finite, and the scale is halved. After `dynamic_growth_steps` steps in which
        they could it is doubled.
        """

    @property
    def value(self) -> float:
        """The dynamic scale."""
        return float(self.optimizer.dynamic_scale.numpy())


def explain_overflow(scales: Iterable[tuple[LossScale, Any]]) -> str:
    """Why gradients can't be used; "" where they can.

    Args:
        scales: with whether theirs can be.
    """
    return ", ".join(
        f"gradients of the scaled loss are not finite; {scale.optimizer.name!r} lowers its scale to {scale.value:g}"
        for scale, usable in scales
        if not usable
    )
