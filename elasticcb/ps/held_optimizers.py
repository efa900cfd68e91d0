"""The state of the workers' optimizers on one server, as arrays.

Servers run no optimizer on dense weights: workers do, and push what it holds. State that no worker has pushed yet, and
no checkpoint or master has given, is missing: workers start it afresh, as Keras does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elasticcb.errors import CheckpointError, ElasticCBError
from elasticcb.optimizers.state import LEARNING_RATE, Optimizers, OptimizerState
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import Slice, VariableSpec

logger = logging.getLogger(__name__)

_KINDS = ("slots", "extras", "shared")


class HeldOptimizers:
    """The state for the variables of `slices`. Its arrays are replaced, never modified."""

    def __init__(self, specs: Sequence[VariableSpec], slices: Sequence[Slice], optimizers: Optimizers) -> None:
        self._specs = specs
        self._parts = {part.variable: part for part in slices if specs[part.variable].trainable}
        self._names, self._periods = tuple(optimizers.names), dict(optimizers.periods)
        self._held: dict[str, dict[Any, Array]] = {kind: {} for kind in _KINDS}
        self._not_shown: dict[str, int] = {}  # steps missing in `iterations`, by its key
        rate = optimizers.learning_rate
        if rate is not None:
            dtype = np.float32 if float(np.float32(rate)) == rate else np.float64  # as that of the optimizer's variable
            self._held["shared"][LEARNING_RATE] = np.asarray(rate, dtype)

    @property
    def learning_rate(self) -> float:
        """The base rate; 0 if a schedule sets it, or each optimizer in a MultiOptimizer has its own."""
        return float(self._held["shared"].get(LEARNING_RATE, 0.0))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Raises `ElasticCBError` when the optimizer has no rate of its own."""
        held = self._held["shared"].get(LEARNING_RATE)
        if held is None:
            raise ElasticCBError(
                f"The learning rate can't be set to {learning_rate}: the optimizer {', '.join(self._names)} has a "
                "schedule, or is a MultiOptimizer, which has no rate of its own. Create the optimizer with a number "
                "instead, or don't set the learning rate."
            )
        self._held["shared"][LEARNING_RATE] = np.asarray(learning_rate, held.dtype)

    def state(self) -> OptimizerState:
        """All of it, in the shapes of this server's parts."""
        return OptimizerState(**{kind: dict(self._held[kind]) for kind in _KINDS}, optimizers=self._names)

    def shared_state(self) -> OptimizerState:
        """State that belongs to no single variable."""
        return OptimizerState(shared=dict(self._held["shared"]), optimizers=self._names)

    def check(self, state: OptimizerState) -> None:
        """Raises `ElasticCBError` if some part of `state` does not fit."""
        foreign = {*state.optimizers} - {*self._names} if self._names else set()
        wrong = [
            f"{self._shown(key)}, {value.dtype.name}{list(value.shape)}"
            for kind, key, value in _arrays(state)
            if not self._fits(kind, key, value)
        ]
        if foreign or wrong:
            raise ElasticCBError(
                f"The state of optimizer {', '.join(state.optimizers) or '(unknown)'} does not fit the optimizer "
                f"{', '.join(self._names) or '(unknown)'} of this job"
                f"{': it has ' + '; '.join(wrong[:4]) if wrong else ''}. Use the optimizer and settings that produced "
                "the state."
            )

    def _fits(self, kind: str, key: Any, value: Array) -> bool:
        if kind != "shared":
            part = self._parts.get(key[0])
            if part is None or (kind == "slots" and value.shape[:1] != part.shape(self._specs[key[0]])[:1]):
                return False
        held = self._held[kind].get(key)
        return held is None or (held.shape == value.shape and np.can_cast(value.dtype, held.dtype, "same_kind"))

    def load(self, state: OptimizerState) -> None:
        """Sets the values of a checked `state`; other parts stay unchanged."""
        for kind, key, value in _arrays(state):
            self._set(kind, key, value)

    def _set(self, kind: str, key: Any, value: Array) -> None:
        held = self._held[kind].get(key)
        # A copy: the memory of a call is used again.
        self._held[kind][key] = np.array(value, value.dtype if held is None else held.dtype)

    def merge(self, state: OptimizerState, batches: int, others: int) -> None:
        """Moves the state towards that of a worker's optimizers, by the worker's share of all batches.

        Args:
            others: batches of other workers that the state does not include.
        """
        share = batches / (batches + others)
        for kind, key, given in _arrays(state):
            held = self._held[kind].get(key)
            if kind == "shared" and str(key).endswith(LEARNING_RATE):  # the master sets it
                if key != LEARNING_RATE:
                    self._set(kind, key, given)
            elif held is None:
                self._set(kind, key, given)
            elif given.dtype.kind in "iu":  # a step counter
                self._set(kind, key, np.asarray(self._counted(str(key), int(held), int(given), batches, others)))
            elif share < 1:
                self._held[kind][key] = (held + (given - held) * share).astype(held.dtype)
            else:
                self._set(kind, key, given)

    def _counted(self, key: str, held: int, given: int, batches: int, others: int) -> int:
        """The total number of steps of all workers, when one worker's counter is at `given`.

        Periodic actions, such as applying accumulated gradients, happen on each worker separately, so it must not lose
        its position in the period: steps of others are added only in whole periods.
        """
        period = self._periods.get(key, 1)
        if period == 1 or not others:
            return given + others
        steps = held + self._not_shown.get(key, 0) + batches
        shown = given + max(0, steps - given) // period * period
        self._not_shown[key] = max(0, steps - shown)
        return shown

    def restore(self, state: OptimizerState) -> None:
        """Restores a checkpoint's state. Raises `CheckpointError` when it belongs to other optimizers."""
        if not state.optimizers:
            logger.warning("The checkpoint has no optimizer state; %s starts fresh.", ", ".join(self._names))
            return
        if self._names and state.optimizers != self._names:
            raise CheckpointError(
                f"The checkpoint was written with the optimizer {', '.join(state.optimizers)}, but the job has "
                f"{', '.join(self._names)}. Use the same optimizer, or start only from the weights: load them into the "
                "model."
            )
        self.load(state)

    def _shown(self, key: Any) -> str:
        if isinstance(key, str):
            return key
        known = 0 <= key[0] < len(self._specs)
        return f"{key[1]} of {self._specs[key[0]].path!r}" if known else f"{key[1]} of variable {key[0]}"


def _arrays(state: OptimizerState) -> Iterator[tuple[str, Any, Array]]:
    for kind in _KINDS:
        given: Mapping[Any, Array] = getattr(state, kind)
        for key, value in given.items():
            yield kind, key, value
