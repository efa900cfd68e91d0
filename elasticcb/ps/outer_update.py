"""What an outer optimizer makes of how far workers have moved the weights."""

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
    """Takes minus the movement of a round as the gradient of one more optimizer (DiLoCo, Douillard et al. 2023).

    Args:
        text: which one, as of `outer_optimizer`.
        specs, slices, values: as of `TrainedPart`.
    """

    def __init__(
        self, text: str, specs: Sequence[VariableSpec], slices: Sequence[Slice], values: Mapping[int, Array]
    ) -> None:
        own = [replace(spec, optimizer=0) for spec in specs]
        self._dense = tuple(index for index, spec in enumerate(own) if spec.trainable and not spec.table)
        self._part = TrainedPart(own, slices, lambda count: [outer_optimizer(text)], values)
        self._optimizers = self._part.need_optimizers()

    def move(self, part: TrainedPart, movements: Movements, by_xla: bool) -> None:
        """Moves all variables of `part`, by the optimizer; constraints hold afterwards, too."""
        weights = part.weights()
        gradients = {dtype: -total_movement(dtype, movements).astype(block.dtype) for dtype, block in weights.items()}
        self._part.set_weights(weights)
        self._part.apply(Push(self._dense, gradients, {}, updated=frozenset(self._dense)), by_xla)
        part.set_weights(self._part.weights())

    def state(self) -> OptimizerState:
        """Everything that the optimizer holds. The arrays do not change later."""
        return self._optimizers.state()

    def check(self, state: OptimizerState) -> None:
        """Raises `ElasticCBError` unless all of `state` has a place here."""
        self._optimizers.check(state)

    def load(self, state: OptimizerState) -> None:
        """Sets what a checked `state` holds."""
        self._optimizers.load(state)

    def restore(self, state: OptimizerState) -> None:
        """Sets its state from a checkpoint; starts afresh, with a warning, if that is of none or another optimizer."""
        if state.optimizers == self._optimizers.names:
            self._optimizers.restore(state)
        else:
            held = ", ".join(state.optimizers) or "none"
            logger.warning(
                "The checkpoint was written with the outer optimizer %s; %s starts afresh.",
                held,
                self._optimizers.kinds,
            )
