"""What optimizers have learned, whole: apart from any server, file or Keras object.

It travels between the parameter servers and the Keras optimizers of a model in one process: what `fit` was
given goes on from there, and what a callback saves or the caller gets back is as if trained in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.errors import ElasticCBError
from elasticcb.rpc.tensors import Array

if TYPE_CHECKING:
    import keras

    from elasticcb.optimizers.variables import Leaf, OptimizerVariables

Key = tuple[int, str]  # index of the model's variable, name


@dataclass
class OptimizerState:
    """Whole variables of all optimizers, whatever the number of servers.

    Attributes:
        slots: with the rows of the model's variable, [rows, …]: of its shape, unless the optimizer reduces over rows.
        extras: of other shapes that belong to one variable.
        shared: of no variable: "iterations", "learning_rate"; "1/iterations" of the model's second optimizer,
            "0.1/iterations" of the second one inside a MultiOptimizer.
        optimizers: class names, with the same prefixes; empty where they are not known.
    """

    slots: dict[Key, Array] = field(default_factory=dict)
    extras: dict[Key, Array] = field(default_factory=dict)
    shared: dict[str, Array] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()


@dataclass
class ModelState:
    """All weights, in the order of `model.weights`, and the state of all optimizers.

    Attributes:
        ids: of embedding tables, by variable: the ids (int64 [n], in order) that the weights [n, dim], and the slots,
            are rows of. Where none are given, they are 0, 1, ….
        used: of embedding tables, by variable: the version at which each of these rows was last trained, int64 [n].
            Where none are given, nobody knows.
    """

    version: int
    weights: list[Array]
    optimizer: OptimizerState
    ids: dict[int, Array] = field(default_factory=dict)
    used: dict[int, Array] = field(default_factory=dict)


def read_optimizers(
    model_optimizers: Sequence[keras.optimizers.Optimizer],
    model_variables: Sequence[keras.Variable],
    owners: Sequence[int] | None = None,
) -> OptimizerState:
    """Copies what the optimizers hold, and builds those that are not built yet.

    Args:
        model_optimizers: of the model.
        model_variables: `model.weights`.
        owners: for each of the variables, the index of its optimizer. Without it, several optimizers that
            are not built yet are left out: what they would hold is what any new one holds.

    Raises `ElasticCBError` when a built optimizer does not know a variable that is to be trained.
    """
    held = held_variables(model_optimizers, model_variables, owners)
    return OptimizerState(_copied(held.slots), _copied(held.extras), _copied(held.shared), held.optimizers)


def held_variables(
    model_optimizers: Sequence[keras.optimizers.Optimizer],
    model_variables: Sequence[keras.Variable],
    owners: Sequence[int] | None = None,
) -> OptimizerState:
    """The same, with the variables in the place of arrays."""
    held = OptimizerState()
    names = []
    for leaf, found in _built_leaves(model_optimizers, model_variables, owners):
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
    owners: Sequence[int] | None = None,
) -> None:
    """Makes the optimizers hold `state`; those that are not built yet are built first.

    Slots of variables that are not trained stay as they are.

    Args:
        model_optimizers, model_variables, owners: as in `read_optimizers`.

    Raises `ElasticCBError`, before anything is changed, when the state is of another optimizer or model.
    """
    from elasticcb.optimizers.traits import MultiOptimizer, unwrapped
    from elasticcb.tf.row_variables import make_whole

    matches = _Matches()
    unused = {*state.slots, *state.extras, *state.shared}
    names = []
    for leaf, found in _built_leaves(model_optimizers, model_variables, owners):
        names.append(leaf.class_name)
        unused -= matches.add(state, leaf, found, model_variables)
    differences = [
        *matches.differences,
        *(f"{key if isinstance(key, str) else key[1]} that the optimizer has not" for key in unused),
    ]
    given = state.optimizers or tuple(names)
    if differences or {*given} - {*names}:
        shown = "; ".join(differences[:4]) + (f" and {len(differences) - 4} more" if len(differences) > 4 else "")
        raise ElasticCBError(
            f"The state of {', '.join(given) or 'no optimizer'} does not fit the model's optimizer "
            f"{', '.join(names) or 'none'}{': it has ' + shown if shown else ''}. Use the model and the optimizer, "
            "with the settings, that the state is of."
        )
    for target, value in matches.same:
        target.assign(value)
    for target, value in matches.resized:
        make_whole(target, value)
    for optimizer in map(unwrapped, model_optimizers):
        if isinstance(optimizer, MultiOptimizer):  # it counts for itself
            optimizer._iterations.assign(max(int(inner._iterations) for inner in optimizer.optimizers))


@dataclass
class _Matches:
    """Variables of optimizers, and what a state holds for them.

    Attributes:
        same: of the same shape.
        resized: of tables that hold another number of rows now.
        differences: what does not fit, in words.
    """

    same: list[tuple[Any, Array]] = field(default_factory=list)
    resized: list[tuple[Any, Array]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def add(
        self, state: OptimizerState, leaf: Leaf, found: OptimizerVariables, variables: Sequence[keras.Variable]
    ) -> set[Any]:
        """Matches the variables of one optimizer; answers the keys of the state that they have taken."""
        from elasticcb.optimizers.variables import has_free_rows

        used: set[Any] = set()
        for slots, source in ((found.slots, state.slots), (found.extras, state.extras)):
            for slot in slots:
                variable = variables[slot.variable]
                rows = variable.shape[0] if has_free_rows(variable) else 0
                key, what = (slot.variable, slot.name), f"{slot.name} of {variable.path!r}"
                self._match(source.get(key), what, slot.value, variable.trainable, rows)
                used.add(key)
        for name, value in found.shared.items():
            own = leaf.prefix + name
            self._match(state.shared.get(own), own, value, True, 0)
            used.add(own)
        return used

    def _match(self, value: Array | None, what: str, target: Any, needed: bool, rows: int) -> None:
        if value is None:
            self.differences.extend([f"no {what}"] if needed else [])
        elif rows and len(value) == rows != target.shape[0] and tuple(value.shape[1:]) == tuple(target.shape[1:]):
            self.resized.append((target, value))
        elif tuple(value.shape) != tuple(target.shape):
            self.differences.append(f"{what} of the shape {list(value.shape)} instead of {list(target.shape)}")
        else:
            self.same.append((target, value))


def _built_leaves(
    optimizers: Sequence[Any], variables: Sequence[Any], owners: Sequence[int] | None
) -> Iterator[tuple[Leaf, OptimizerVariables]]:
    # Imported here: this module is also for processes that have not imported Keras yet.
    from elasticcb.optimizers.traits import unwrapped
    from elasticcb.optimizers.variables import leaves, optimizer_variables

    for place, optimizer in enumerate(optimizers):
        trained = {
            index: variable
            for index, variable in enumerate(variables)
            if variable.trainable and (owners is None or owners[index] == place)
        }
        inner = unwrapped(optimizer)
        if not optimizer.built:
            if owners is None and len(optimizers) > 1:
                continue
            optimizer.build(list(trained.values()))
        keys = {inner._var_key(variable) for variable in inner._trainable_variables}
        known = {index: variable for index, variable in enumerate(variables) if inner._var_key(variable) in keys}
        unknown = [variable.path for index, variable in trained.items() if index not in known]
        if unknown and (owners is not None or len(optimizers) == 1):
            raise ElasticCBError(
                f"The optimizer {inner.name} is built already, without {unknown[0]!r}, which is to be trained now. "
                "Compile the model again, with a new optimizer, after a change of what is trainable."
            )
        for leaf in leaves(optimizer, place, known):
            yield leaf, optimizer_variables(leaf.optimizer, leaf.variables)


def _copied(variables: Mapping[Any, Any]) -> dict[Any, Array]:
    return {key: np.array(variable.numpy()) for key, variable in variables.items()}
