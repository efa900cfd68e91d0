"""A Keras optimizer as run by a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import numpy as np

from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.keras_private import rate_of, set_decays, trained_by, updates_of
from elasticcb.optimizers.traits import clips_on_server, may_join, not_cached, sets_final_weights
from elasticcb.optimizers.variables import Leaf, Slot, optimizer_variables
from elasticcb.ps.joined import Piece, groups_of, join

_ANCHOR = -1  # an index of no variable in the model


class ServerOptimizer:
    """An optimizer built on a server's variables.

    Args:
        make: creates the same leaf again, with a fresh optimizer.
        variables: variables to build on, with the weights' values, by index in the model.
        undecayed: indices of variables excluded from weight decay.
        groups: indices of variables to update as one (elasticcb/ps/joined.py). None: as many as possible.

    Attributes:
        name, optimizer: of the leaf. Global clipping and loss scaling are off: the worker does both, because it has all
            gradients.
        slots, extras, shared: its variables, as in `OptimizerVariables`.

    Raises `ModelFileError` when the optimizer can't be built.
    """

    def __init__(
        self,
        leaf: Leaf,
        make: Callable[[], Leaf],
        variables: dict[int, keras.Variable],
        undecayed: frozenset[int] = frozenset(),
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._make, self._undecayed = make, undecayed
        self.name, self.prefix, self.class_name = leaf.name, leaf.prefix, leaf.class_name
        self.optimizer = leaf.optimizer
        self.updates = frozenset(leaf.variables)
        _prepare(self.optimizer)
        self.groups = self._joinable(variables) if groups is None else [tuple(group) for group in groups]
        self.variables: dict[int, keras.Variable | Piece] = dict(variables)
        for group in self.groups:
            self.variables |= join(variables, group, f"joined{group[0]}")
        self._anchor = self._make_anchor(leaf)
        # A flat variable is identified by the index of its first variable.
        held = {self._group_of(index)[0]: self._updated(index) for index in self.variables}
        known = {_ANCHOR: self._anchor, **held} if self._anchor is not None else held
        _build(self.optimizer, list(known.values()))
        # The master has resolved `exclude_from_weight_decay` on the original model's variables.
        set_decays(self.optimizer, ((variable, index not in undecayed) for index, variable in held.items()))
        found = optimizer_variables(self.optimizer, known)
        self.slots = [part for slot in found.slots if slot.variable != _ANCHOR for part in self._parts(slot)]
        self.extras = [slot for slot in found.extras if slot.variable != _ANCHOR]
        self.shared = found.shared

    def _joinable(self, variables: Mapping[int, keras.Variable]) -> list[tuple[int, ...]]:
        if not may_join(self.optimizer):
            return []
        free = {index: variable for index, variable in variables.items() if variable.constraint is None}
        return groups_of(
            {index: (variable.dtype, index in self._undecayed) for index, variable in free.items()},
            {index: int(np.prod(variable.shape)) for index, variable in free.items()},
        )

    def _group_of(self, index: int) -> tuple[int, ...]:
        return next((group for group in self.groups if index in group), (index,))

    def _updated(self, index: int) -> keras.Variable:
        """The variable that the optimizer updates."""
        variable = self.variables[index]
        return variable.whole if isinstance(variable, Piece) else variable

    def _parts(self, slot: Slot) -> list[Slot]:
        """A slot, or its parts for the variables of a group."""
        return [
            slot._replace(variable=index, value=variable.of(slot.value) if isinstance(variable, Piece) else slot.value)
            for index in self._group_of(slot.variable)
            for variable in [self.variables[index]]
        ]

    def grouped(self, variables: Collection[int]) -> list[tuple[tuple[int, ...], keras.Variable]]:
        """The optimizer's variables for `variables`, with groups as a whole: (indices, one variable for them)."""
        groups = dict.fromkeys(self._group_of(index) for index in variables)
        return [(group, self._updated(group[0])) for group in groups]

    def _make_anchor(self, leaf: Leaf) -> keras.Variable | None:
        """A dummy variable, used when some of the optimizer's variables are on other servers.

        A step that updates only variables of other servers advances the optimizer with it. It also comes first, in
        place of the model's first variable, whose dtype shared variables may take (such as Nadam's product).
        """
        first = next(iter(leaf.variables.values()), None)
        if self.variables and (not leaf.variables or leaf.variables.keys() <= self.variables.keys()):
            return None
        dtype = keras.config.floatx() if first is None else keras.backend.standardize_dtype(first.dtype)
        return keras.Variable(np.zeros((), np.float32), dtype=dtype, trainable=True, name="anchor")

    def advance(self) -> None:
        """Makes a step that changes only shared state, no variable of the model. For compiled functions."""
        if self._anchor is not None:
            self.optimizer.apply([keras.ops.zeros_like(self._anchor)], [self._anchor])
        else:
            updates_of(self.optimizer).assign_add(1)

    def clone(self, index: int, variable: keras.Variable) -> ServerOptimizer:
        """A fresh optimizer with the single variable `variable`, which represents variable `index` of the model."""
        return ServerOptimizer(self._make(), self._make, {index: variable}, self._undecayed)

    @property
    def kind(self) -> str:
        """The class's name."""
        return type(self.optimizer).__name__

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule or function computes the learning rate."""
        return not isinstance(rate_of(self.optimizer), keras.Variable)

    @property
    def learning_rate(self) -> float:
        return float(np.asarray(self.optimizer.learning_rate))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Raises `ElasticCBError` when the optimizer has a schedule."""
        if self.has_schedule:
            schedule = type(rate_of(self.optimizer)).__name__
            raise ElasticCBError(
                f"The learning rate can't be set to {learning_rate}: the optimizer {self.kind} uses a {schedule}. "
                f"Create the optimizer with a number instead ({self.kind}(learning_rate={learning_rate:g})), or don't "
                "set the learning rate."
            )
        self.optimizer.learning_rate = not_cached(learning_rate)

    def finalize(self) -> bool:
        """Sets the final weights (moving averages, in Keras's classes); returns whether there was anything to set."""
        if not self.variables or not sets_final_weights(self.optimizer):
            return False
        self.optimizer.finalize_variable_values(trained_by(self.optimizer))
        return True


def _prepare(optimizer: keras.optimizers.Optimizer) -> None:
    if optimizer.built:
        raise ModelFileError(
            f"The function that creates the optimizer returned one ({optimizer.name}) that is already in use. It must "
            "create a new one at each call."
        )
    if not clips_on_server(optimizer):
        optimizer.global_clipnorm = None
    optimizer.loss_scale_factor = None
    # A server is the only replica. Keras's reduction over replicas would leak every traced update: it defines a
    # gradient, which TensorFlow registers globally.
    object.__setattr__(optimizer, "_all_reduce_sum_gradients", list)


def _build(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    try:
        optimizer.build(variables)
    except Exception as error:
        raise ModelFileError(
            f"The optimizer {type(optimizer).__name__} can't be built on a parameter server's variables: "
            f"{describe(error)}",
            user_traceback(error),
        ) from error
