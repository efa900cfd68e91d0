"""What a training step of the model is to the servers: a push."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.compute.backend import GradientComputation, Prepared, TableRows
from elasticcb.model.metric_messages import States
from elasticcb.rpc.tensors import all_finite
from elasticcb.sharding.flat_blocks import PlacedBlocks, state_moves
from elasticcb.sharding.partition import VariableSpec, layout
from elasticcb.sharding.push import Gradients


@dataclass
class TrainResult:
    """A training step: what to push, the batch's own logs, and its metric states."""

    push: Gradients
    logs: dict[str, Any]
    states: States
    # Why there is nothing to push: the scaled loss has gradients that are not finite. What the step did to
    # non-trainable variables (moving statistics) is then left out, too; its metrics count, as in `fit`.
    overflow: str = ""


def train(
    computation: GradientComputation,
    specs: Sequence[VariableSpec],
    batch: Prepared,
    weights: PlacedBlocks,
    version: int,
    rows: TableRows,
) -> TrainResult:
    """Gradients of a batch, for the servers that `weights` are of.

    Args:
        computation: of the model.
        specs: of `model.weights`.
        batch, weights, version, rows: as in `Computation.train`.
    """
    step = computation.train(batch, weights, version, rows)
    state, shares = state_moves(weights, step.state, specs, weights.partition, step.decays)
    push = Gradients(
        gradients=step.gradients,
        dense_variables=step.dense_variables,
        rows=step.rows,
        state=state,
        shares=shares,
        loss=float(np.mean(step.logs["loss"])) if "loss" in step.logs else 0.0,
        partition=weights.partition,
    )
    overflow = ""
    if not _is_finite(push):
        push.non_finite = _find_non_finite(push, specs)
        if np.isfinite(push.loss):  # else no scale can help
            overflow = step.overflow
    return TrainResult(push, step.logs, step.states, overflow)


def _is_finite(push: Gradients) -> bool:
    arrays = [flat for server in push.gradients for flat in server.values()]
    arrays += [
        flat[shares[dtype] > 0]
        for server, shares in zip(push.state, push.shares, strict=True)
        for dtype, flat in server.items()
    ]
    arrays += [values for _, values in push.rows.values()]
    return bool(np.isfinite(push.loss)) and all(map(all_finite, arrays))


def _find_non_finite(push: Gradients, specs: Sequence[VariableSpec]) -> str:
    if not np.isfinite(push.loss):
        return "the loss"
    for index, (_, values) in push.rows.items():
        if not np.isfinite(values.astype(np.float64)).all():
            return f"the gradient of {specs[index].path!r}"
    for server, slices in enumerate(push.partition or ()):
        gradients, state = push.gradients[server], push.state[server]
        for part, dtype, offset in layout(specs, slices, True, push.dense_variables):
            if not np.isfinite(gradients[dtype][offset : offset + part.elements].astype(np.float64)).all():
                return f"the gradient of {specs[part.variable].path!r}"
        for part, dtype, offset in layout(specs, slices, False):
            here = slice(offset, offset + part.elements)
            if (
                dtype in state
                and not np.isfinite(state[dtype][here][push.shares[server][dtype][here] > 0].astype(float)).all()
            ):
                return f"the new value of {specs[part.variable].path!r}"
    return ""
