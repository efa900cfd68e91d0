"""Reads and sets the state of Keras optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from elasticcb.errors import CheckpointError, ElasticCBError
from elasticcb.keras_private import key_in, trained_by, updates_of
from elasticcb.optimizers.state import Key, OptimizerState
from elasticcb.optimizers.traits import MultiOptimizer, sets_final_weights, unwrapped
from elasticcb.optimizers.variables import Leaf, OptimizerVariables, has_free_rows, leaves, optimizer_variables
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import VariableSpec
from elasticcb.tf.tensors import make_whole


def read_optimizers(
    model_optimizers: Sequence[keras.optimizers.Optimizer],
    model_variables: Sequence[keras.Variable],
    specs: Sequence[VariableSpec] | None = None,
) -> OptimizerState:
    """Copies the state of the optimizers that train something, and builds those that are not built yet.

    Args:
        specs: their specs, which say which optimizer trains them. Without them, several unbuilt optimizers are skipped,
            because they only have initial state.

    Raises `ElasticCBError` if a built optimizer lacks a variable that must be trained.
    """
    return copy_of(held_variables(model_optimizers, model_variables, specs))


def held_variables(
    model_optimizers: Sequence[keras.optimizers.Optimizer],
    model_variables: Sequence[keras.Variable],
    specs: Sequence[VariableSpec] | None = None,
) -> OptimizerState:
    """The same, with variables instead of arrays."""
    held = OptimizerState()
    names = []
    for leaf, found in _built_leaves(model_optimizers, model_variables, specs):
        names.append(leaf.class_name)
        held.slots |= {(slot.variable, slot.name): slot.value for slot in found.slots}
        held.extras |= {(slot.variable, slot.name): slot.value for slot in found.extras}
        held.shared |= {leaf.prefix + name: variable for name, variable in found.shared.items()}
    held.optimizers = tuple(names)
    return held


def write_optimizers(
    state: OptimizerState,
    model_optimizers: Sequence[keras.optimizers.Optimizer],
    model_variables: Sequence[keras.Variable],
    specs: Sequence[VariableSpec] | None = None,
) -> None:
    """Sets the state of the optimizers that train something; those that are not built yet are built first.

    Slots of variables that are not trained are not changed, and neither are optimizers that have made no step.

    Raises `ElasticCBError`, before anything is changed, if the state belongs to another optimizer or model.
    """
    matches = _Matches()
    unused = {*state.slots, *state.extras, *state.shared}
    names = []
    for leaf, found in _built_leaves(model_optimizers, model_variables, specs):
        names.append(leaf.class_name)
        unused -= matches.add(state, leaf, found, model_variables)
    differences = [
        *matches.differences,
        *(f"{key if isinstance(key, str) else key[1]} that the optimizer lacks" for key in unused),
    ]
    given = state.optimizers or tuple(names)
    if differences or {*given} - {*names}:
        shown = "; ".join(differences[:4]) + (f" and {len(differences) - 4} more" if len(differences) > 4 else "")
        raise ElasticCBError(
            f"The state of {', '.join(given) or 'no optimizer'} does not match the model's optimizer "
            f"{', '.join(names) or 'none'}{': it has ' + shown if shown else ''}. Use the same model and optimizer, "
            "with the same settings, as when the state was saved."
        )
    for target, value in matches.same:
        target.assign(value)
    for target, value in matches.resized:
        make_whole(target, value)
    for optimizer in map(unwrapped, model_optimizers):
        if isinstance(optimizer, MultiOptimizer) and optimizer.built:  # it has its own counter
            updates_of(optimizer).assign(max(int(updates_of(inner)) for inner in optimizer.optimizers))


def set_final_weights(
    model_optimizers: Sequence[keras.optimizers.Optimizer],
    model_variables: Sequence[keras.Variable],
    specs: Sequence[VariableSpec],
) -> None:
    """Lets the optimizers set the final weights: in Keras's classes, their moving average."""
    for leaf, _ in _built_leaves(model_optimizers, model_variables, specs):
        if sets_final_weights(leaf.optimizer):
            leaf.optimizer.finalize_variable_values(trained_by(leaf.optimizer))


def check_restored(
    state: OptimizerState,
    model_optimizers: Sequence[keras.optimizers.Optimizer],
    model_variables: Sequence[keras.Variable],
    specs: Sequence[VariableSpec],
    checkpoint: str,
) -> str:
    """A warning of what `state`, of a checkpoint, lacks except for embedding tables; "": nothing.

    Raises `CheckpointError` when it has something else.
    """
    held = held_variables(model_optimizers, model_variables, specs)
    given, missing = {(kind, key): value for kind, key, value in state.items()}, []
    for kind, key, target in held.items():
        value = given.pop((kind, key), None)
        if not isinstance(key, str) and specs[key[0]].table:
            continue
        if value is None:
            missing.append(_shown(key, specs))
        elif tuple(value.shape) != tuple(target.shape):
            raise CheckpointError(
                f"The optimizer's {_shown(key, specs)} has the shape {list(value.shape)} in the checkpoint "
                f"{checkpoint} and {list(target.shape)} in this job. The model or the optimizer's settings have "
                "changed since; use those of the checkpoint."
            )
    unknown = [_shown(key, specs) for _, key in given]
    if unknown:
        raise CheckpointError(
            f"The checkpoint {checkpoint} has {_some(unknown)}, which the job's optimizer lacks. Use the optimizer's "
            "settings of the checkpoint, or start only from the weights: load them into the model."
        )
    if missing:
        return f"The checkpoint {checkpoint} lacks values of the optimizer, which start fresh: {_some(missing)}."
    return ""


def _shown(key: Key | str, specs: Sequence[VariableSpec]) -> str:
    return key if isinstance(key, str) else f"{key[1]} of {specs[key[0]].path!r}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@dataclass
class _Matches:
    """Variables of optimizers, matched with the values in a state.

    Attributes:
        same: variables with the same shape.
        resized: variables of tables whose number of rows has changed.
        differences: descriptions of mismatches.
    """

    same: list[tuple[Any, Array]] = field(default_factory=list)
    resized: list[tuple[Any, Array]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def add(
        self, state: OptimizerState, leaf: Leaf, found: OptimizerVariables, variables: Sequence[keras.Variable]
    ) -> set[Any]:
        """Matches the variables of one optimizer; returns the keys of the state that were used."""

        used: set[Any] = set()
        is_fresh = leaf.prefix + "iterations" not in state.shared
        for slots, source in ((found.slots, state.slots), (found.extras, state.extras)):
            for slot in slots:
                variable = variables[slot.variable]
                rows = variable.shape[0] if has_free_rows(variable) else 0
                key, what = (slot.variable, slot.name), f"{slot.name} of {variable.path!r}"
                if key in source or not is_fresh:
                    self._match(source.get(key), what, slot.value, rows)
                used.add(key)
        for name, value in found.shared.items():
            own = leaf.prefix + name
            if own in state.shared or not is_fresh:
                self._match(state.shared.get(own), own, value, 0)
            used.add(own)
        return used

    def _match(self, value: Array | None, what: str, target: Any, rows: int) -> None:
        if value is None:
            self.differences.append(f"no {what}")
        elif rows and len(value) == rows != target.shape[0] and tuple(value.shape[1:]) == tuple(target.shape[1:]):
            self.resized.append((target, value))
        elif tuple(value.shape) != tuple(target.shape):
            self.differences.append(f"{what} of the shape {list(value.shape)} instead of {list(target.shape)}")
        else:
            self.same.append((target, value))


def _built_leaves(
    optimizers: Sequence[Any], variables: Sequence[Any], specs: Sequence[VariableSpec] | None
) -> Iterator[tuple[Leaf, OptimizerVariables]]:

    for place, optimizer in enumerate(optimizers):
        given = {index: each for index, each in enumerate(variables) if each.trainable}
        trained = given
        if specs is not None:
            given = {index: variables[index] for index, spec in enumerate(specs) if spec.optimizer == place}
            trained = {index: variable for index, variable in given.items() if specs[index].trainable}
            if not trained and place:  # the first one has the learning rate that callbacks set, used or not
                continue
        inner = unwrapped(optimizer)
        if not optimizer.built and (trained or specs is None):
            if specs is None and len(optimizers) > 1:
                continue
            optimizer.build(list(given.values()))
        keys = {key_in(inner, variable) for variable in trained_by(inner)}
        known = {index: variable for index, variable in trained.items() if key_in(inner, variable) in keys}
        unknown = [variable.path for index, variable in trained.items() if index not in known]
        if unknown and (specs is not None or len(optimizers) == 1):
            raise ElasticCBError(
                f"The optimizer {inner.name} was built without {unknown[0]!r}, which must be trained now. After "
                "changing what is trainable, compile the model again with a new optimizer."
            )
        for leaf in leaves(optimizer, place, known):
            yield leaf, optimizer_variables(leaf.optimizer, leaf.variables)


def copy_of(held: OptimizerState) -> OptimizerState:
    """With arrays instead of variables."""
    return OptimizerState(copied(held.slots), copied(held.extras), copied(held.shared), held.optimizers)


def copied(variables: Mapping[Any, Any]) -> dict[Any, Array]:
    """Copies of their values, which a step does not change."""
    return {key: np.array(variable.numpy()) for key, variable in variables.items()}
