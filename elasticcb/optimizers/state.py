"""The complete state of optimizers, independent of servers, files and Keras objects.

It is transferred between parameter servers and the Keras optimizers of a model in one process: `fit` continues from the
state that it was given, and a model that a callback saves or the caller gets back is as if trained in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from elasticcb.rpc.tensors import Array

Key = tuple[int, str]  # index of the model's variable, name

LEARNING_RATE = "learning_rate"  # the shared variable of the model's first optimizer


class Optimizers(NamedTuple):
    """What servers know of a job's optimizers.

    Attributes:
        names: as `OptimizerState.optimizers`.
        periods: for step counters, by the name in `OptimizerState.shared`: after how many steps the behaviour repeats.
        learning_rate: the base rate; None if it can't be set.
    """

    names: tuple[str, ...] = ()
    periods: Mapping[str, int] = MappingProxyType({})
    learning_rate: float | None = None


@dataclass
class OptimizerState:
    """Complete variables of all optimizers, independent of the number of servers.

    Attributes:
        slots: variables with the rows of the model's variable, [rows, …]: of the same shape, unless the optimizer
            reduces rows.
        extras: variables of other shapes that belong to one variable.
        shared: variables that belong to no variable: "iterations", "learning_rate"; "1/iterations" of the model's
            second optimizer, "0.1/iterations" of the second one inside a MultiOptimizer.
        optimizers: class names, with the same prefixes; empty if unknown.
    """

    slots: dict[Key, Array] = field(default_factory=dict)
    extras: dict[Key, Array] = field(default_factory=dict)
    shared: dict[str, Array] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()

    def items(self) -> Iterator[tuple[str, Any, Array]]:
        """Of each variable the attribute with it, its key and its value."""
        for kind in ("slots", "extras", "shared"):
            for key, value in getattr(self, kind).items():
                yield kind, key, value


@dataclass
class ModelState:
    """All weights, in the order of `model.weights`, and the state of all optimizers.

    Attributes:
        ids: for embedding tables, by variable: the ids (int64 [n], ascending) of the rows of the weights [n, dim] and
            the slots. Default: 0, 1, ….
        used: for embedding tables, by variable: the version at which each of these rows was last trained, int64 [n];
            unknown for missing variables.
    """

    version: int
    weights: list[Array]
    optimizer: OptimizerState
    ids: dict[int, Array] = field(default_factory=dict)
    used: dict[int, Array] = field(default_factory=dict)
