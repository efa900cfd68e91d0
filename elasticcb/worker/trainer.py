"""Turns a training step of the model into a push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.compute.backend import GradientComputation, Prepared, TableRows
from elasticcb.model.metric_messages import States
from elasticcb.rpc.tensors import Array, all_finite
from elasticcb.sharding.flat_blocks import PlacedBlocks, first_non_finite, state_moves
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.push import Gradients

Moves = Callable[..., tuple[list[dict[str, Array]], list[dict[str, Array]]]]  # as `state_moves`


@dataclass
class TrainResult:
    """A training step: the push, the batch's own logs, and its metric states."""

    push: Gradients
    logs: dict[str, Any]
    states: States
    # Why there is nothing to push: gradients of the scaled loss are not finite. The step's changes of non-trainable
    # variables (moving statistics) are then dropped too; its metrics count, as in `fit`.
    overflow: str = ""


def train(
    computation: GradientComputation,
    specs: Sequence[VariableSpec],
    batch: Prepared,
    weights: PlacedBlocks,
    version: int,
    rows: TableRows,
    moves: Moves = state_moves,
) -> TrainResult:
    """Gradients of a batch, for the servers that hold `weights`."""
    step = computation.train(batch, weights, version, rows)
    state, shares = moves(weights, step.state, specs, weights.partition, step.decays)
    push = Gradients(
        gradients=step.gradients,
        dense_variables=step.dense_variables,
        rows=step.rows,
        state=state,
        shares=shares,
        loss=step.loss,
        partition=weights.partition,
    )
    push.non_finite = _find_non_finite(push, specs)
    # No scale helps if the loss is not finite.
    overflow = step.overflow if push.non_finite and np.isfinite(push.loss) else ""
    return TrainResult(push, step.logs, step.states, overflow)


def _find_non_finite(push: Gradients, specs: Sequence[VariableSpec]) -> str:
    if not np.isfinite(push.loss):
        return "the loss"
    for index, (_, values) in push.rows.items():
        if not all_finite(values):
            return f"the gradient of {specs[index].path!r}"
    for server, slices in enumerate(push.partition or ()):
        path = first_non_finite(push.gradients[server], specs, slices, True, push.dense_variables)
        if path:
            return f"the gradient of {path!r}"
        path = first_non_finite(push.state[server], specs, slices, False, shares=push.shares[server])
        if path:
            return f"the new value of {path!r}"
    return ""
