"""Messages with the state of optimizers: split for each parameter server, and joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from elasticcb.errors import WireError
from elasticcb.optimizers.state import Key, OptimizerState
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import (
    EXTRAS,
    SHARED,
    SLOTS,
    STATE,
    TABLE,
    WEIGHTS,
    by_index_and_name,
    named,
    of_kind,
    without,
)
from elasticcb.sharding.partition import Slice, VariableSpec, cut_slots


def to_tensors(state: OptimizerState) -> dict[str, Array]:
    """Names on the wire: "slots/I/NAME", "extras/I/NAME", "shared/NAME"."""
    return named(SLOTS, state.slots) | named(EXTRAS, state.extras) | named(SHARED, state.shared)


def from_tensors(tensors: Mapping[str, Array], optimizers: Iterable[str] = ()) -> OptimizerState:
    """The inverse of `to_tensors`. Ignores tensors of weights and tables; raises `WireError` for others."""
    unknown = without(tensors, WEIGHTS, STATE, TABLE, SLOTS, EXTRAS, SHARED)
    if unknown:
        raise WireError(
            f"A state contains a tensor named {next(iter(unknown))!r}. Expected weights/DTYPE, state/DTYPE, "
            "slots/INDEX/NAME, extras/INDEX/NAME and shared/NAME."
        )
    slots, extras = (by_index_and_name(kind, tensors) for kind in (SLOTS, EXTRAS))
    return OptimizerState(slots, extras, of_kind(SHARED, tensors), tuple(optimizers))


def cut_state(state: OptimizerState, specs: Sequence[VariableSpec], slices: Sequence[Slice]) -> OptimizerState:
    """The part of a complete state for the server with `slices`, without untrained variables.

    Raises `WireError` if a slot has other rows than its variable.
    """
    held = {part.variable for part in slices if specs[part.variable].trainable}
    slots = cut_slots(state.slots, specs, slices)
    extras = {key: value for key, value in state.extras.items() if key[0] in held}
    return OptimizerState(slots, extras, dict(state.shared), state.optimizers)


def join_states(
    states: Sequence[OptimizerState], specs: Sequence[VariableSpec], parts: Sequence[Sequence[Slice]]
) -> OptimizerState:
    """Joins the parts of all servers; shared variables and duplicate extras come from the first server.

    A slot that some server lacks, because no movement has reached it yet, is left out.
    """
    whole = OptimizerState(optimizers=states[0].optimizers)
    missing: dict[Key, int] = {}  # elements of a slot's variable
    for state, slices in zip(states, parts, strict=True):
        held = {part.variable: part for part in slices}
        for (index, name), value in state.slots.items():
            spec = specs[index]
            if (index, name) not in whole.slots:
                whole.slots[index, name] = np.empty((*spec.shape[:1], *value.shape[1:]), value.dtype)
            held[index].of(whole.slots[index, name], spec)[...] = value
            missing[index, name] = missing.get((index, name), spec.elements) - held[index].elements
        whole.extras = {**state.extras, **whole.extras}
        whole.shared = {**state.shared, **whole.shared}
    whole.slots = {key: slot for key, slot in whole.slots.items() if not missing[key]}
    return whole
