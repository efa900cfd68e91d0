"""Every optimizer of Keras, and the options that they share, for `test_matrix.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from elasticcb.optimizers import RowWiseAdagrad

schedules = keras.optimizers.schedules


@dataclass(frozen=True)
class OptimizerCase:
    """One line of a list in docs/keras_support.md."""

    what: str
    make: Callable[[], Any]
    tolerance: float = 1e-5


def exported_classes() -> set[str]:
    """What `keras.optimizers` has, so that a new class is noticed."""
    found = vars(keras.optimizers).items()
    return {name for name, value in found if inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer)}


def exported_schedules() -> set[str]:
    found = vars(schedules).items()
    kind = schedules.LearningRateSchedule
    return {name for name, value in found if inspect.isclass(value) and issubclass(value, kind) and value is not kind}


# By class; the second column says what is particular about it.
CLASSES = {
    "Adadelta": OptimizerCase("", lambda: keras.optimizers.Adadelta(0.5)),
    "Adafactor": OptimizerCase("variables are not split", lambda: keras.optimizers.Adafactor(0.05)),
    "Adagrad": OptimizerCase("", lambda: keras.optimizers.Adagrad(0.05)),
    "Adam": OptimizerCase("", lambda: keras.optimizers.Adam(0.01, amsgrad=True)),
    "AdamW": OptimizerCase("", lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)),
    "Adamax": OptimizerCase("", lambda: keras.optimizers.Adamax(0.01)),
    "Ftrl": OptimizerCase("", lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.01)),
    "Lamb": OptimizerCase("variables are not split", lambda: keras.optimizers.Lamb(0.01)),
    "Lion": OptimizerCase("", lambda: keras.optimizers.Lion(0.005)),
    "LossScaleOptimizer": OptimizerCase(
        "each worker has its own scale",
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 4.0, dynamic_growth_steps=3),
    ),
    "MultiOptimizer": OptimizerCase(
        "has no learning rate that callbacks could set",
        lambda: keras.optimizers.MultiOptimizer(
            lambda variable: keras.optimizers.SGD(0.1) if "bias" in variable.path else keras.optimizers.Adam(0.01)
        ),
    ),
    "Muon": OptimizerCase("variables are not split", lambda: keras.optimizers.Muon(0.01), 1e-3),
    "Nadam": OptimizerCase("", lambda: keras.optimizers.Nadam(0.01)),
    "RMSprop": OptimizerCase("", lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True)),
    "SGD": OptimizerCase("", lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)),
    "ScheduleFreeAdamW": OptimizerCase("variables are not split", lambda: keras.optimizers.ScheduleFreeAdamW(0.01)),
}
# Exported, and no optimizers to train with.
NOT_TO_TRAIN_WITH = {"Optimizer": "the base class"}

SCHEDULES = {
    "CosineDecay": lambda: schedules.CosineDecay(0.1, 6, warmup_target=0.3, warmup_steps=2),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.1, 3),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.3, 2, 0.5),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.3, 2, 0.5),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([2, 5], [0.3, 0.1, 0.01]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.3, 5),
}


class Halved(schedules.LearningRateSchedule):
    """As users write them: without a get_config."""

    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start / (1.0 + keras.ops.cast(step, "float32"))


class Signs(keras.optimizers.Optimizer):
    """An optimizer of the user's."""

    def build(self, variables):
        super().build(variables)
        self.means = [self.add_variable_from_reference(variable, "mean") for variable in variables]

    def update_step(self, gradient, variable, learning_rate):
        mean = self.means[self._get_variable_index(variable)]
        self.assign(mean, 0.9 * mean + 0.1 * gradient)
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * keras.ops.sign(mean))


def without_decay_of_biases() -> Any:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIONS = {
    "`clipnorm`": lambda: keras.optimizers.SGD(0.3, momentum=0.9, clipnorm=0.1),
    "`clipvalue`": lambda: keras.optimizers.SGD(0.3, clipvalue=0.02),
    "`global_clipnorm`": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1),
    "`weight_decay`, `exclude_from_weight_decay`": without_decay_of_biases,
    "`use_ema`": lambda: keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8),
    "`ema_overwrite_frequency`": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
    ),
    "`gradient_accumulation_steps`": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=3),
    "`gradient_accumulation_steps` with `clipnorm`": lambda: keras.optimizers.SGD(
        0.3, clipnorm=0.1, gradient_accumulation_steps=2
    ),
    "`gradient_accumulation_steps` with `global_clipnorm` (one server)": lambda: keras.optimizers.SGD(
        0.3, global_clipnorm=0.1, gradient_accumulation_steps=2
    ),
    "`gradient_accumulation_steps` with a schedule": lambda: keras.optimizers.SGD(
        SCHEDULES["ExponentialDecay"](), gradient_accumulation_steps=2
    ),
    "`loss_scale_factor`": lambda: keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=64.0),
    "a custom schedule": lambda: keras.optimizers.SGD(Halved(0.3)),
    "a custom optimizer": lambda: Signs(0.01),
    "`elasticcb.optimizers.RowWiseAdagrad`": lambda: RowWiseAdagrad(0.05),
}
