"""Applies an outer optimizer to the movements of local training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from elasticcb.optimizers.outer import outer_optimizer
from elasticcb.optimizers.state import OptimizerState
from elasticcb.ps.trained_part import Movements, TrainedPart, total_movement
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.sharding.push import Push

logger = logging.getLogger(__name__)


class OuterUpdate:
    """Uses minus the movement of a round as the gradient of one more optimizer (DiLoCo, Douillard et al. 2023)."""

    def __init__(
        self, text: str, specs: Sequence[VariableSpec], slices: Sequence[Slice], values: Mapping[int, Array]
    ) -> None:
        own = [replace(spec, optimizer=0) for spec in specs]
        self._dense = tuple(index for index, spec in enumerate(own) if spec.trainable and not spec.table)
        self._part = TrainedPart(own, slices, lambda count: [outer_optimizer(text)], values)
        self.optimizers = self._part.need_optimizers()

    def move(self, part: TrainedPart, movements: Movements, by_xla: bool) -> None:
        """Moves all variables of `part` by the optimizer; constraints are applied afterwards."""
        weights = part.weights()
        gradients = {dtype: -total_movement(dtype, movements).astype(block.dtype) for dtype, block in weights.items()}
        self._part.set_weights(weights)
        self._part.apply(Push(self._dense, gradients, {}, updated=frozenset(self._dense)), by_xla)
        part.set_weights(self._part.weights())

    def restore(self, state: OptimizerState) -> None:
        """Restores its state from a checkpoint; starts fresh, with a warning, if it is missing or does not match."""
        if state.optimizers == self.optimizers.names:
            self.optimizers.restore(state)
        else:
            held = ", ".join(state.optimizers) or "none"
            logger.warning(
                "The checkpoint was written with the outer optimizer %s; %s starts fresh.",
                held,
                self.optimizers.kinds,
            )
