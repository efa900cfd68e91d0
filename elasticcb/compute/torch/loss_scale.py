"""Loss scaling, on the gradients of a step that has run."""

from __future__ import annotations

from typing import Any

import keras
import torch

from elasticcb.compute.loss_scale import LossScale


class TorchScale(LossScale):
    """For the arguments, see `LossScale`."""

    def unscale(self, gradients: dict[int, Any]) -> tuple[dict[int, Any], bool]:
        plain = {index: plain_gradient(self.optimizer, gradient) for index, gradient in gradients.items()}
        if not self.dynamic or not gradients:
            return plain, True
        scale, counter = self.optimizer.dynamic_scale, self.optimizer.step_counter
        usable = all(bool(torch.isfinite(_values(gradient)).all()) for gradient in gradients.values())
        grows = usable and int(counter.value) == self.optimizer.dynamic_growth_steps - 1
        counter.assign(int(counter.value) + 1 if usable and not grows else 0)
        scale.assign(float(scale.value) * (2.0 if grows else 1.0 if usable else 0.5))
        return plain, usable


def plain_gradient(optimizer: keras.optimizers.Optimizer, gradient: torch.Tensor) -> torch.Tensor:
    """Converts a gradient of the loss scaled by `optimizer` to one of the plain loss."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # An unbuilt optimizer has used the initial scale.
        scale = float(optimizer.dynamic_scale.value if optimizer.built else optimizer.initial_scale)
    elif optimizer.loss_scale_factor is not None:
        scale = optimizer.loss_scale_factor
    else:
        return gradient
    # At least in single precision, like Keras: a scale may exceed the range of float16.
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.to(wide) / scale


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
