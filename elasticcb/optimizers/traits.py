"""Properties of an optimizer's updates: whether variables can be split between servers, and rows updated separately."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from elasticcb.keras_private import layers_of, multiply_rate, rate_of, updates_of
from elasticcb.optimizers.rowwise_adagrad import RowWiseAdagrad
from elasticcb.rpc.tensors import Array

# Their update of an element depends only on that element, its gradient and its slots. Subclasses may differ, so only
# exactly these classes count.
_ELEMENTWISE = frozenset(
    {
        keras.optimizers.SGD,
        keras.optimizers.RMSprop,
        keras.optimizers.Adam,
        keras.optimizers.AdamW,
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Adamax,
        keras.optimizers.Ftrl,
        keras.optimizers.Nadam,
        keras.optimizers.Lion,
    }
)

# Keras has these two since about 3.14, and older releases are supported. Nothing is an instance of ().
MultiOptimizer: Any = getattr(keras.optimizers, "MultiOptimizer", ())
_ScheduleFree = getattr(keras.optimizers, "ScheduleFreeAdamW", None)


# Elementwise as well, but each update must include rows without a gradient, because it averages over steps.
_ELEMENTWISE_BUT_NOT_LAZY = frozenset({_ScheduleFree})


def public_class(optimizer: keras.optimizers.Optimizer) -> type[keras.optimizers.Optimizer]:
    """The public class. On PyTorch, Keras uses internal subclasses of some optimizers."""
    return next(kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("keras.src.backend."))


def is_own_class(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer is of the user's own class, neither Keras's nor elasticcb's."""
    return public_class(unwrapped(optimizer)).__module__.partition(".")[0] not in ("keras", "elasticcb")


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer updates each element independently. A user's class declares it with a class attribute
    `elementwise = True`."""
    optimizer = unwrapped(optimizer)
    return public_class(optimizer) in _ELEMENTWISE or vars(type(optimizer)).get("elementwise") is True


def reduces_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer's class declares, with a class attribute `rowwise = True`, that its update of a row depends
    only on that row, its gradient and its slots, which may have any width."""
    return vars(type(unwrapped(optimizer))).get("rowwise") is True


def _is_rowwise(optimizer: keras.optimizers.Optimizer) -> bool:
    return is_elementwise(optimizer) or reduces_rows(optimizer)


def may_split(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether variables may be split between servers by rows: clipping by a variable's norm needs the complete
    variable."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, MultiOptimizer):
        return all(map(may_split, optimizer.optimizers))
    rowwise = _is_rowwise(optimizer) or public_class(optimizer) in _ELEMENTWISE_BUT_NOT_LAZY
    return rowwise and optimizer.clipnorm is None


def may_join(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether several variables may be updated as one: a user's class may depend on a variable's path or shape."""
    optimizer = unwrapped(optimizer)
    return public_class(optimizer) in _ELEMENTWISE | _ELEMENTWISE_BUT_NOT_LAZY and optimizer.clipnorm is None


def may_join_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether rows of one width of several embedding tables may be updated as rows of one."""
    optimizer = unwrapped(optimizer)
    return may_join(optimizer) or (type(optimizer) is RowWiseAdagrad and optimizer.clipnorm is None)


def may_update_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether gradients of rows update only these rows.

    Otherwise they are converted to dense gradients: a moving average of the weights and gradient accumulation change
    every row in each update, and an optimizer that is neither elementwise nor rowwise needs the complete gradient.
    """
    return _is_rowwise(optimizer) and not optimizer.use_ema and not optimizer.gradient_accumulation_steps


def may_serve_rows(optimizer: keras.optimizers.Optimizer, num_ps: int) -> bool:
    """Whether a variable may be an embedding table, whose rows are spread over `num_ps` servers and updated
    separately."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, MultiOptimizer):
        return all(may_serve_rows(inner, num_ps) for inner in optimizer.optimizers)
    return may_update_rows(optimizer) and (num_ps == 1 or optimizer.clipnorm is None)


def period_of(optimizer: keras.optimizers.Optimizer) -> int:
    """After how many steps an optimizer's behaviour repeats."""
    every = [optimizer.gradient_accumulation_steps, optimizer.ema_overwrite_frequency if optimizer.use_ema else None]
    return math.lcm(*(steps or 1 for steps in every))


def sets_final_weights(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the final weights differ from the trained ones; in Keras's classes, they are their moving average."""
    optimizer = unwrapped(optimizer)
    own = type(optimizer).finalize_variable_values is not keras.optimizers.Optimizer.finalize_variable_values
    return bool(optimizer.use_ema or own)


def model_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """All optimizers of a model: `model.optimizer` first, then attributes of the model or of its layers, including
    those in lists and dicts, ordered by attribute name. The order is the same in every process."""
    found: list[keras.optimizers.Optimizer] = []

    def add(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer) and all(value is not known for known in found):
            found.append(value)

    add(getattr(model, "optimizer", None))
    for layer in layers_of(model):
        for name, value in sorted(vars(layer).items()):
            if name.startswith("_self_"):  # of TensorFlow's tracking, in another order, and not in every process
                continue
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            for item in items:
                add(item)
    return found


def steps_made(optimizers: Iterable[keras.optimizers.Optimizer]) -> int:
    """The number of updates: the maximum over all optimizers, because a step need not apply all of them."""
    built = [unwrapped(optimizer) for optimizer in optimizers if optimizer.built]
    return max((int(updates_of(optimizer)) for optimizer in built), default=0)


def learning_rate_variable(optimizer: keras.optimizers.Optimizer | None) -> keras.Variable | None:
    """The variable of the settable learning rate; None if a schedule controls it, or each optimizer in a MultiOptimizer
    has its own."""
    optimizer = unwrapped(optimizer)
    if optimizer is None or isinstance(optimizer, MultiOptimizer):
        return None
    rate = rate_of(optimizer)
    return rate if isinstance(rate, keras.Variable) else None


def multiply_learning_rate(optimizer: keras.optimizers.Optimizer, factor: float) -> None:
    """Multiplies an optimizer's learning rate, for updates and weight decay, by `factor`."""
    multiply_rate(optimizer, factor)


def not_cached(number: float) -> Array:
    """Converts a number so that TensorFlow does not cache it: it caches every Python number that it has seen.

    About 700 bytes for each model version or learning rate add up to a gigabyte in 1.5 million steps.
    """
    return np.asarray(number)


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The inner optimizer: losses are scaled where they are computed, on the workers."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer
