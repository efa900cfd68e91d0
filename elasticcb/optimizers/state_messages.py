"""The state of optimizers as it travels to and from the parameter servers: cut for each, and joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from elasticcb.errors import WireError
from elasticcb.optimizers.state import OptimizerState
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
    """Named as they travel: "slots/I/NAME", "extras/I/NAME", "shared/NAME"."""
    return named(SLOTS, state.slots) | named(EXTRAS, state.extras) | named(SHARED, state.shared)


def from_tensors(tensors: Mapping[str, Array], optimizers: Iterable[str] = ()) -> OptimizerState:
    """The inverse of `to_tensors`. Tensors of weights and tables are passed over; `WireError` for others."""
    unknown = without(tensors, WEIGHTS, STATE, TABLE, SLOTS, EXTRAS, SHARED)
    if unknown:
        raise WireError(
            f"A state holds a tensor named {next(iter(unknown))!r}; known are weights/DTYPE, state/DTYPE, "
            "slots/INDEX/NAME, extras/INDEX/NAME and shared/NAME."
        )
    slots, extras = (by_index_and_name(kind, tensors) for kind in (SLOTS, EXTRAS))
    return OptimizerState(slots, extras, of_kind(SHARED, tensors), tuple(optimizers))


def cut_state(state: OptimizerState, specs: Sequence[VariableSpec], slices: Sequence[Slice]) -> OptimizerState:
    """What the server that holds `slices` gets of a whole state; that of untrained variables is left out.

    Raises `WireError` when a slot has other rows than its variable.
    """
    held = {part.variable for part in slices if specs[part.variable].trainable}
    slots = cut_slots(state.slots, specs, slices)
    extras = {key: value for key, value in state.extras.items() if key[0] in held}
    return OptimizerState(slots, extras, dict(state.shared), state.optimizers)


def join_states(
    states: Sequence[OptimizerState], specs: Sequence[VariableSpec], parts: Sequence[Sequence[Slice]]
) -> OptimizerState:
    """The whole state from all servers' parts: shared variables, and extras that several have, are the first's."""
    whole = OptimizerState(optimizers=states[0].optimizers)
    for state, slices in zip(states, parts, strict=True):
        held = {part.variable: part for part in slices}
        for (index, name), value in state.slots.items():
            spec = specs[index]
            if (index, name) not in whole.slots:
                whole.slots[index, name] = np.empty((*spec.shape[:1], *value.shape[1:]), value.dtype)
            held[index].of(whole.slots[index, name], spec)[...] = value
        whole.extras = {**state.extras, **whole.extras}
        whole.shared = {**state.shared, **whole.shared}
    return whole
