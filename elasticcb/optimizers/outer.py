"""The outer optimizer of local updates: which optimizers are allowed, and how its state is stored next to the
others."""

from __future__ import annotations

import json

import keras

from elasticcb.errors import UsageError, describe
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.traits import sets_final_weights

_PREFIX = "outer/"


def outer_optimizer(text: str) -> keras.optimizers.Optimizer:
    """Creates the outer optimizer.

    Args:
        text: the name of a Keras optimizer, or the JSON of `keras.optimizers.serialize`.

    Raises `UsageError` if it is not a Keras optimizer, or can't work on parts of a model.
    """
    given = f"--outer_optimizer={text}"
    expected = (
        "Expected one of Keras's optimizers: its name, such as sgd, or the JSON of keras.optimizers.serialize, such as "
        '{"class_name": "SGD", "config": {"learning_rate": 0.7}}.'
    )
    try:
        optimizer = keras.optimizers.get(json.loads(text) if text.lstrip().startswith("{") else text)
    except Exception as error:
        raise UsageError(f"{given} is invalid. {expected} Keras reports: {describe(error)}") from error
    if not isinstance(optimizer, keras.optimizers.Optimizer) or not type(optimizer).__module__.startswith("keras."):
        raise UsageError(f"{given} is invalid: it creates a {type(optimizer).__name__}. {expected}")
    if optimizer.global_clipnorm:
        raise UsageError(
            f"{given} can't have global_clipnorm: each parameter server has only a part of the movement, so none "
            "knows its norm. Use clipnorm, which clips each variable, or clipvalue."
        )
    if sets_final_weights(optimizer):
        raise UsageError(
            f"{given} is invalid: its final weights differ from the weights that it trains, as for ScheduleFreeAdamW "
            "and any optimizer with use_ema. Use it as the model's own optimizer, or choose another outer optimizer."
        )
    return optimizer


def with_outer(state: OptimizerState, outer: OptimizerState) -> OptimizerState:
    """The state of the model's optimizers and of the outer one, which has its own names: "outer/momentums"."""
    return OptimizerState(
        state.slots | {(index, _PREFIX + name): value for (index, name), value in outer.slots.items()},
        state.extras | {(index, _PREFIX + name): value for (index, name), value in outer.extras.items()},
        state.shared | {_PREFIX + name: value for name, value in outer.shared.items()},
        (*state.optimizers, *(_PREFIX + name for name in outer.optimizers)),
    )


def without_outer(state: OptimizerState) -> OptimizerState:
    """The state of the model's optimizers."""
    return OptimizerState(
        {key: value for key, value in state.slots.items() if not key[1].startswith(_PREFIX)},
        {key: value for key, value in state.extras.items() if not key[1].startswith(_PREFIX)},
        {name: value for name, value in state.shared.items() if not name.startswith(_PREFIX)},
        tuple(name for name in state.optimizers if not name.startswith(_PREFIX)),
    )


def of_outer(state: OptimizerState) -> OptimizerState:
    """The state of the outer optimizer, by its own names."""
    return OptimizerState(
        {(i, name[len(_PREFIX) :]): value for (i, name), value in state.slots.items() if name.startswith(_PREFIX)},
        {(i, name[len(_PREFIX) :]): value for (i, name), value in state.extras.items() if name.startswith(_PREFIX)},
        {name[len(_PREFIX) :]: value for name, value in state.shared.items() if name.startswith(_PREFIX)},
        tuple(name[len(_PREFIX) :] for name in state.optimizers if name.startswith(_PREFIX)),
    )
