"""A model's optimizers, for training in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from elasticcb.compute.backend import LocalModel
from elasticcb.errors import ModelFileError
from elasticcb.keras_private import set_decays
from elasticcb.optimizers.held_state import copied, copy_of, held_variables
from elasticcb.optimizers.state import LEARNING_RATE, OptimizerState
from elasticcb.optimizers.traits import unwrapped
from elasticcb.optimizers.variables import leaves_of
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import VariableSpec


def prepared(
    model: keras.Model, specs: Sequence[VariableSpec], optimizers: Sequence[keras.optimizers.Optimizer]
) -> OptimizerState:
    """Builds the optimizers for training; returns their variables. Raises `ModelFileError` when that fails."""
    if any(spec.table for spec in specs):
        inner = (leaf.optimizer for leaf in leaves_of(optimizers, specs, model.weights))
        _check_clipping([*map(unwrapped, optimizers), *inner])
    variables = held_variables(optimizers, model.weights, specs)
    for optimizer in map(unwrapped, optimizers):
        # The master has resolved `exclude_from_weight_decay`.
        pairs = zip(model.weights, specs, strict=True)
        set_decays(optimizer, ((variable, not spec.no_weight_decay) for variable, spec in pairs))
    return variables


def _check_clipping(optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
    """Raises `ModelFileError` for clipping across gradients applied by worker and servers."""
    for optimizer in optimizers:
        if optimizer.global_clipnorm:
            raise ModelFileError(
                f"The optimizer {optimizer.name!r} has global_clipnorm, and the model has embedding tables on the "
                "servers. A worker applies all gradients except those of their rows, so it can't clip them together. "
                "Use clipnorm or clipvalue, or keras.layers.Embedding."
            )


class HoldsOptimizers(LocalModel):
    """A model whose optimizer variables can be read and set at any time."""

    def __init__(self, variables: OptimizerState) -> None:
        self._held = variables

    def optimizer_state(self) -> OptimizerState:
        return copy_of(self._held)

    def shared_optimizer_state(self) -> Mapping[str, Array]:
        return copied(self._held.shared)

    def set_optimizer_state(self, state: OptimizerState) -> None:
        for kind, key, value in state.items():
            own = getattr(self._held, kind)
            if key in own and key != LEARNING_RATE:
                own[key].assign(np.array(value))
