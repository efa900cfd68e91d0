"""What may be done with an optimizer's updates: cut a variable between servers, update rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras.src.api_export import REGISTERED_OBJS_TO_NAMES

from elasticcb.optimizers.rowwise_adagrad import RowWiseAdagrad
from elasticcb.rpc.tensors import Array

# Their update of an element depends on nothing but that element, its gradient and its slots. A
# subclass may have changed that, so the classes must be exactly these.
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

# Keras has these two since 3.14 or so; older ones are supported. Nothing is an instance of ().
MultiOptimizer: Any = getattr(keras.optimizers, "MultiOptimizer", ())
_ScheduleFree = getattr(keras.optimizers, "ScheduleFreeAdamW", None)

# Attributes with how much of it they have.
_MOMENTUM = ("momentum", "beta_1")

# Elementwise too, but of use only when rows without a gradient take part in each update: it averages over steps.
_ELEMENTWISE_BUT_NOT_LAZY = frozenset({_ScheduleFree})


def public_class(optimizer: keras.optimizers.Optimizer) -> type[keras.optimizers.Optimizer]:
    """The class that users know. On PyTorch, Keras has classes of its own below some."""
    return next(kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("keras.src.backend."))


def name_publicly(optimizers: Iterable[keras.optimizers.Optimizer]) -> None:
    """Lets Keras write optimizers down by their `public_class`, so that they can be read on another framework."""
    for optimizer in map(unwrapped, optimizers):
        for each in (optimizer, *(getattr(optimizer, "optimizers", None) or ())):
            name = REGISTERED_OBJS_TO_NAMES.get(public_class(each))
            if name is not None:
                REGISTERED_OBJS_TO_NAMES.setdefault(type(each), name)


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer updates each element on its own. A user's class says so itself, with a
    class attribute `elementwise = True`."""
    optimizer = unwrapped(optimizer)
    return public_class(optimizer) in _ELEMENTWISE or vars(type(optimizer)).get("elementwise") is True


def reduces_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer's class says, with a class attribute `rowwise = True`, that its update of a row depends on
    nothing but that row, its gradient and its slots, which may be of any width."""
    return vars(type(unwrapped(optimizer))).get("rowwise") is True


def _is_rowwise(optimizer: keras.optimizers.Optimizer) -> bool:
    return is_elementwise(optimizer) or reduces_rows(optimizer)


def may_split(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether variables may be cut between servers, between rows: clipping by a variable's norm needs it whole."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, MultiOptimizer):
        return all(map(may_split, optimizer.optimizers))
    rowwise = _is_rowwise(optimizer) or public_class(optimizer) in _ELEMENTWISE_BUT_NOT_LAZY
    return rowwise and optimizer.clipnorm is None


def may_join(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether several variables may be updated as one: a user's class may look at a variable's path or shape."""
    optimizer = unwrapped(optimizer)
    return public_class(optimizer) in _ELEMENTWISE | _ELEMENTWISE_BUT_NOT_LAZY and optimizer.clipnorm is None


def may_join_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether rows of one width of several embedding tables may be updated as rows of one."""
    optimizer = unwrapped(optimizer)
    return may_join(optimizer) or (type(optimizer) is RowWiseAdagrad and optimizer.clipnorm is None)


def may_update_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether gradients of rows update those rows alone.

    Otherwise they are made dense: a moving average of the weights, and accumulated gradients, change
    every row at each update, and an optimizer that treats neither elements nor rows on their own needs the whole
    gradient.
    """
    return _is_rowwise(optimizer) and not optimizer.use_ema and not optimizer.gradient_accumulation_steps


def may_serve_rows(optimizer: keras.optimizers.Optimizer, num_ps: int) -> bool:
    """Whether a variable may be an embedding table, whose rows are on all of `num_ps` servers and are updated alone."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, MultiOptimizer):
        return all(may_serve_rows(inner, num_ps) for inner in optimizer.optimizers)
    return may_update_rows(optimizer) and (num_ps == 1 or optimizer.clipnorm is None)


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether the optimizer's weight decay, if it has any, concerns `variable`.

    Not when `exclude_from_weight_decay` names it: as an object, or by what is found in a name. On TensorFlow that is
    the name of the `tf.Variable`, with the names of layers, but in classes that decay in a way of their own (Muon).
    """
    own = type(optimizer)._apply_weight_decay is not keras.optimizers.Optimizer._apply_weight_decay
    is_variable = hasattr(variable.value, "assign")  # as of TensorFlow; other values are arrays
    return bool(optimizer._use_weight_decay(variable.value if is_variable and not own else variable))


def clips_on_server(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the server clips by the global norm: with accumulation Keras clips the accumulated gradient, which
    only the server knows. Otherwise the worker does, who has the gradients of all variables."""
    optimizer = unwrapped(optimizer)
    return bool(optimizer.gradient_accumulation_steps and optimizer.global_clipnorm)


def sets_final_weights(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the weights that training ends with are others than those that it trained: their moving average, in
    Keras's classes."""
    optimizer = unwrapped(optimizer)
    own = type(optimizer).finalize_variable_values is not keras.optimizers.Optimizer.finalize_variable_values
    return bool(optimizer.use_ema or own)


def model_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Every optimizer that a model holds: `model.optimizer` first, then those that are attributes of the model or
    of its layers, also in lists and dicts, by the attribute's name. The same order in every process."""
    found: list[keras.optimizers.Optimizer] = []

    def add(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer) and all(value is not known for known in found):
            found.append(value)

    add(getattr(model, "optimizer", None))
    for layer in model._flatten_layers():
        for _, value in sorted(vars(layer).items()):
            items = (
                value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
            )
            for item in items:
                add(item)
    return found


def steps_made(optimizers: Iterable[keras.optimizers.Optimizer]) -> int:
    """How many updates they have made: the most of any, since a step need not apply all of them."""
    built = [unwrapped(optimizer) for optimizer in optimizers if optimizer.built]
    return max((int(optimizer._iterations) for optimizer in built), default=0)


def kinds_with_momentum(optimizers: Iterable[keras.optimizers.Optimizer]) -> list[str]:
    """The classes of those among `optimizers`, and inside of a MultiOptimizer, whose updates go on in the direction of
    those before; sorted."""
    inner = [each for held in map(unwrapped, optimizers) for each in getattr(held, "optimizers", None) or [held]]
    return sorted({type(each).__name__ for each in inner if any(getattr(each, name, 0) for name in _MOMENTUM)})


def learning_rate_variable(optimizer: keras.optimizers.Optimizer | None) -> keras.Variable | None:
    """What holds the learning rate that can be set; None where a schedule rules it, or each of the optimizers inside
    a MultiOptimizer has its own."""
    optimizer = unwrapped(optimizer)
    if optimizer is None or isinstance(optimizer, MultiOptimizer):
        return None
    return optimizer._learning_rate if isinstance(optimizer._learning_rate, keras.Variable) else None


def multiply_learning_rate(optimizer: keras.optimizers.Optimizer, factor: float) -> None:
    """Lets an optimizer update, and decay weights, by `factor` times the rate that it holds or computes."""
    rate = optimizer._get_current_learning_rate
    object.__setattr__(optimizer, "_get_current_learning_rate", lambda: rate() * factor)


def not_cached(number: float) -> Array:
    """The number as TensorFlow takes it without keeping it: of Python's numbers, it caches each that it ever saw.

    Some 700 bytes for each version of a model, or rate of a schedule, become a gigabyte in 1.5 million steps.
    """
    return np.asarray(number)


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that does the work: losses are scaled where they are computed, on the workers."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer
