"""The outer optimizer of local updates: which one it may be, and how its state is kept beside that of the others."""

from __future__ import annotations

import json

import keras

from elasticcb.errors import UsageError, describe
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.traits import sets_final_weights

_PREFIX = "outer/"


def outer_optimizer(text: str) -> keras.optimizers.Optimizer:
    """A new optimizer.

    Args:
        text: a name that Keras knows, or the JSON of `keras.optimizers.serialize`.

    Raises `UsageError` when that is none of Keras's optimizers, or one that can't work on parts of a model.
    """
    given = f"--outer_optimizer={text}"
    expected = (
        "Expected one of Keras's optimizers: its name, such as sgd, or the JSON of keras.optimizers.serialize, such as "
        '{"class_name": "SGD", "config": {"learning_rate": 0.7}}.'
    )
    try:
        optimizer = keras.optimizers.get(json.loads(text) if text.lstrip().startswith("{") else text)
    except Exception as error:
        raise UsageError(f"{given} is invalid. {expected} Keras says: {describe(error)}") from error
    if not isinstance(optimizer, keras.optimizers.Optimizer) or not type(optimizer).__module__.startswith("keras."):
        raise UsageError(f"{given} can't be: it makes {type(optimizer).__name__}. {expected}")
    if optimizer.global_clipnorm:
        raise UsageError(
            f"{given} can't have global_clipnorm: each parameter server has a part of the movement, and no server its "
            "norm. Use clipnorm, which is of each variable, or clipvalue."
        )
    if sets_final_weights(optimizer):
        raise UsageError(
            f"{given} can't be: it ends with other weights than those that it trains, as ScheduleFreeAdamW does, and "
            "any optimizer with use_ema. Use it as the model's own optimizer, or give another one here."
        )
    return optimizer


def with_outer(state: OptimizerState, outer: OptimizerState) -> OptimizerState:
    """What the model's optimizers hold, and what the outer one does, under names of its own: "outer/momentums"."""
    return OptimizerState(
        state.slots | {(index, _PREFIX + name): value for (index, name), value in outer.slots.items()},
        state.extras | {(index, _PREFIX + name): value for (index, name), value in outer.extras.items()},
        state.shared | {_PREFIX + name: value for name, value in outer.shared.items()},
        (*state.optimizers, *(_PREFIX + name for name in outer.optimizers)),
    )


def without_outer(state: OptimizerState) -> OptimizerState:
    """What the model's optimizers hold."""
    return OptimizerState(
        {key: value for key, value in state.slots.items() if not key[1].startswith(_PREFIX)},
        {key: value for key, value in state.extras.items() if not key[1].startswith(_PREFIX)},
        {name: value for name, value in state.shared.items() if not name.startswith(_PREFIX)},
        tuple(name for name in state.optimizers if not name.startswith(_PREFIX)),
    )


def of_outer(state: OptimizerState) -> OptimizerState:
    """What the outer optimizer holds, by its own names."""
    return OptimizerState(
        {(i, name[len(_PREFIX) :]): value for (i, name), value in state.slots.items() if name.startswith(_PREFIX)},
        {(i, name[len(_PREFIX) :]): value for (i, name), value in state.extras.items() if name.startswith(_PREFIX)},
        {name[len(_PREFIX) :]: value for name, value in state.shared.items() if name.startswith(_PREFIX)},
        tuple(name[len(_PREFIX) :] for name in state.optimizers if name.startswith(_PREFIX)),
    )
