"""All optimizers of a model on one parameter server, each with its own variables."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import CheckpointError, ElasticCBError, ModelFileError
from elasticcb.optimizers.state import Key, OptimizerState
from elasticcb.optimizers.variables import Leaf, leaves
from elasticcb.ps.joined import Piece, assign
from elasticcb.ps.optimizer import ServerOptimizer
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.partition import VariableSpec
from elasticcb.tf.convert import array_of

logger = logging.getLogger(__name__)

# Creates fresh optimizers at each call, the model's first ones: at least as many as requested.
MakeOptimizers = Callable[[int], Sequence["keras.optimizers.Optimizer"]]


class _Outline(NamedTuple):
    """Metadata of a variable that may be on another server; a MultiOptimizer accepts it as one."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True


class OptimizerSet:
    """The optimizers of a model, some of which may have no variables on this server.

    Attributes:
        parts: the optimizers; those inside a MultiOptimizer individually.
    """

    def __init__(
        self,
        make_optimizers: MakeOptimizers,
        specs: Sequence[VariableSpec],
        variables: Mapping[int, keras.Variable],
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._specs = specs
        undecayed = frozenset(index for index, spec in enumerate(specs) if spec.no_weight_decay)
        self.parts = [
            ServerOptimizer(
                leaf,
                partial(_make_leaf, make_optimizers, specs, leaf.name),
                {index: variables[index] for index in leaf.variables if index in variables},
                undecayed,
                None if groups is None else [group for group in groups if group[0] in leaf.variables],
            )
            for leaf in _make_leaves(make_optimizers, specs)
        ]
        self.variables = {index: variable for part in self.parts for index, variable in part.variables.items()}
        self.groups = [group for part in self.parts for group in part.groups]
        self._of = {index: part for part in self.parts for index in part.updates}
        self._periods = {part.prefix + "iterations": _period(part.optimizer) for part in self.parts}
        self._targets = list(_targets(self.parts))
        self._variable_of: dict[Any, keras.Variable | Piece] = {key: variable for _, key, variable in self._targets}
        self._not_shown: dict[str, int] = {}  # steps missing in `iterations`, by its key
        self._first = next((part for part in self.parts if part.name == "0"), None)

    @property
    def names(self) -> tuple[str, ...]:
        """Class names; further optimizers have a prefix: "1/SGD"."""
        return tuple(part.class_name for part in self.parts)

    @property
    def kinds(self) -> str:
        """Class names, for messages."""
        return ", ".join(part.kind for part in self.parts)

    def of(self, variable: int) -> ServerOptimizer:
        """The optimizer of a variable of the model."""
        return self._of[variable]

    def updating(self, variables: Collection[int]) -> list[ServerOptimizer]:
        """The optimizers that take part in a step that updates `variables`, here or on other servers."""
        if len(self.parts) == 1:
            return self.parts
        return [part for part in self.parts if not part.updates.isdisjoint(variables)]

    # -------------------------------------------------------------- the learning rate

    @property
    def learning_rate(self) -> float:
        """Of the model's first optimizer; 0 when that is a MultiOptimizer, which has none."""
        return 0.0 if self._first is None else self._first.learning_rate

    @property
    def can_set_learning_rate(self) -> bool:
        return self._first is not None and not self._first.has_schedule

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate changes by itself."""
        return self._first is not None and self._first.has_schedule

    def set_learning_rate(self, learning_rate: float) -> None:
        """Raises `ElasticCBError` when a schedule sets it."""
        if self._first is None:
            raise ElasticCBError(
                f"The learning rate can't be set to {learning_rate}: the model's optimizer is a MultiOptimizer, which "
                "has no learning rate of its own. Don't set it, or use schedules in the optimizers inside it."
            )
        self._first.set_learning_rate(learning_rate)

    # -------------------------------------------------------------- state

    def state(self) -> OptimizerState:
        """The full state of the optimizers, in the shapes of this server's parts. The arrays do not change later."""
        state = self.shared_state()
        for part in self.parts:
            state.slots |= {(slot.variable, slot.name): _present(slot.value) for slot in part.slots}
            state.extras |= {(slot.variable, slot.name): _present(slot.value) for slot in part.extras}
        return state

    def shared_state(self) -> OptimizerState:
        """State that belongs to no single variable."""
        state = OptimizerState(optimizers=self.names)
        for part in self.parts:
            state.shared |= {part.prefix + name: _present(value) for name, value in part.shared.items()}
        return state

    def check(self, state: OptimizerState) -> None:
        """Raises `ElasticCBError` if some part of `state` does not fit."""
        own = self._variable_of
        foreign = {*state.optimizers} - {*self.names}
        given: dict[Any, Any] = {}
        for held in (state.slots, state.extras, state.shared):
            given |= held
        wrong = [
            f"{self._shown(key)}, {value.dtype.name}{list(value.shape)}"
            for key, value in given.items()
            if key not in own or tuple(own[key].shape) != tuple(value.shape) or not _fits(value, own[key])
        ]
        if foreign or wrong:
            raise ElasticCBError(
                f"The state of optimizer {', '.join(state.optimizers) or '(unknown)'} does not fit the optimizer "
                f"{', '.join(self.names)} of this job{': it has ' + '; '.join(wrong[:4]) if wrong else ''}. Use the "
                "optimizer and settings that produced the state."
            )

    def load(self, state: OptimizerState) -> None:
        """Sets the values of a checked `state`; missing parts stay unchanged."""
        given = [(target, getattr(state, kind).get(key)) for kind, key, target in self._targets]
        assign([(target, value) for target, value in given if value is not None])

    def merge(self, state: OptimizerState, batches: int, others: int) -> None:
        """Moves the state towards that of a worker's optimizers, by the worker's share of all batches.

        Args:
            others: batches of other workers that the state does not include.
        """
        share = batches / (batches + others)
        merged: list[tuple[keras.Variable | Piece, Array]] = []
        for kind, key, target in self._targets:
            given = getattr(state, kind).get(key)
            if given is None or (kind == "shared" and str(key).endswith("learning_rate")):  # owned by the servers
                continue
            if given.dtype.kind in "iu":  # a step counter
                merged.append(
                    (target, np.asarray(self._counted(str(key), target, given, batches, others), given.dtype))
                )
            elif share < 1:
                held = _present(target)
                merged.append((target, (held + (given - held) * share).astype(given.dtype)))
            else:
                merged.append((target, given))
        assign(merged)

    def _counted(self, key: str, target: keras.Variable | Piece, given: int, batches: int, others: int) -> int:
        """The total number of steps of all workers, when one worker's counter is at `given`.

        Periodic actions, such as applying accumulated gradients, happen on each worker separately, so it must not lose
        its position in the period: steps of others are added only in whole periods.
        """
        period = self._periods.get(key, 1)
        if period == 1 or not others:
            return given + others
        steps = int(_present(target)) + self._not_shown.get(key, 0) + batches
        shown = given + max(0, steps - given) // period * period
        self._not_shown[key] = max(0, steps - shown)
        return shown

    def restore(self, state: OptimizerState) -> None:
        """Restores a checkpoint's state; missing parts start fresh, with a warning.

        Raises `CheckpointError` when the state belongs to other optimizers.
        """
        if not state.optimizers:
            logger.warning("The checkpoint has no optimizer state; %s starts fresh.", self.kinds)
            return
        if state.optimizers != self.names:
            raise CheckpointError(
                f"The checkpoint was written with the optimizer {', '.join(state.optimizers)}, but the job has "
                f"{', '.join(self.names)}. Use the same optimizer, or start only from the weights: load them into the "
                "model."
            )
        missing = []
        given = []
        for kind, key, target in self._targets:
            value = getattr(state, kind).get(key)
            if value is None:
                missing.append(self._shown(key))
            elif tuple(value.shape) != tuple(target.shape):
                raise CheckpointError(
                    f"The optimizer's {self._shown(key)} has the shape {list(value.shape)} in the checkpoint and "
                    f"{list(target.shape)} in this job. The model or the optimizer's settings have changed since; "
                    "use those of the checkpoint."
                )
            else:
                given.append((target, value))
        assign(given)
        if missing:
            held: list[Key | str] = [*state.slots, *state.extras, *state.shared]
            unused = [self._shown(key) for key in held if key not in self._variable_of]
            logger.warning(
                "The checkpoint lacks these values of the optimizer %s, which start fresh: %s. It has %s, which the "
                "optimizer lacks. It was written with another release of elasticcb or Keras, or with other settings.",
                self.kinds,
                _some(missing),
                _some(unused),
            )

    def _shown(self, key: Key | str) -> str:
        return key if isinstance(key, str) else f"{key[1]} of {self._specs[key[0]].path!r}"

    def finalize(self) -> bool:
        """Lets each optimizer set its final weights; returns whether any did."""
        finalized = [part.finalize() for part in self.parts]
        return any(finalized)


def _targets(parts: Sequence[ServerOptimizer]) -> Iterator[tuple[str, Key | str, keras.Variable | Piece]]:
    """(attribute of `OptimizerState`, key in it, variable) for each variable of the optimizers."""
    for part in parts:
        for slot in part.slots:
            yield "slots", (slot.variable, slot.name), slot.value
        for slot in part.extras:
            yield "extras", (slot.variable, slot.name), slot.value
        for name, value in part.shared.items():
            yield "shared", part.prefix + name, value


def _period(optimizer: keras.optimizers.Optimizer) -> int:
    """The period in steps after which an optimizer's behaviour repeats."""
    every = [optimizer.gradient_accumulation_steps, optimizer.ema_overwrite_frequency if optimizer.use_ema else None]
    return math.lcm(*(steps or 1 for steps in every))


def _present(variable: keras.Variable | Piece) -> Array:
    if isinstance(variable, Piece):
        return variable.numpy()
    # Without a copy: TensorFlow moves a variable to new memory at the next update if its old memory is in use.
    return array_of(tf.convert_to_tensor(variable.value))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "nothing") + more


def _make_leaves(make_optimizers: MakeOptimizers, specs: Sequence[VariableSpec]) -> list[Leaf]:
    """Fresh optimizers, with the variables of the whole model that they update."""
    needed = 1 + max((spec.optimizer for spec in specs if spec.trainable), default=0)
    made = list(make_optimizers(needed))[:needed]
    found: list[Leaf] = []
    for place, optimizer in enumerate(made):
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ModelFileError(
                f"The optimizer function returned {optimizer!r}; expected a keras.optimizers.Optimizer."
            )
        outlines = {
            index: _Outline(spec.path, spec.path.rpartition("/")[2], spec.shape, spec.dtype)
            for index, spec in enumerate(specs)
            if spec.trainable and spec.optimizer == place
        }
        if outlines or not place:  # as `read_optimizers`
            found += leaves(optimizer, place, outlines)
    if len(made) < needed:
        raise ModelFileError(
            f"The model was first built with {needed} optimizers, but on a parameter server it has {len(made)}. Every "
            "process must build the same model."
        )
    return found


def _make_leaf(make_optimizers: MakeOptimizers, specs: Sequence[VariableSpec], name: str) -> Leaf:
    return next(leaf for leaf in _make_leaves(make_optimizers, specs) if leaf.name == name)


def _fits(value: Any, variable: keras.Variable | Piece) -> bool:
    return np.can_cast(value.dtype, dtype_of(variable.dtype), "same_kind")
