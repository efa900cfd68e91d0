"""Gradient clipping on workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import clips_on_server, unwrapped
from elasticcb.optimizers.variables import leaves
from elasticcb.sharding.partition import VariableSpec


@dataclass(frozen=True)
class Clipping:
    """Clipping by the global norm of the gradients of some variables."""

    norm: float
    variables: frozenset[int]


def clippings(
    model: keras.Model, specs: Sequence[VariableSpec], optimizers: Sequence[keras.optimizers.Optimizer], num_ps: int
) -> list[Clipping]:
    """The clipping that the worker does because a server only sees its part of the gradients.

    Raises:
        ModelFileError: only the server could clip, but there are several servers.
    """
    found = []
    for place, optimizer in enumerate(optimizers):
        own = {i: model.weights[i] for i, spec in enumerate(specs) if spec.trainable and spec.optimizer == place}
        for leaf in leaves(optimizer, place, own):
            if clips_on_server(leaf.optimizer):
                _check_one_server(leaf.optimizer, num_ps)
            elif leaf.optimizer.global_clipnorm:
                found.append(Clipping(leaf.optimizer.global_clipnorm, frozenset(leaf.variables)))
    return found


def _check_one_server(optimizer: keras.optimizers.Optimizer, num_ps: int) -> None:
    if num_ps > 1:
        raise ModelFileError(
            f"The optimizer {optimizer.name!r} has both global_clipnorm and gradient_accumulation_steps. The norm is "
            f"that of all accumulated gradients, and each of the {num_ps} parameter servers has only a part of them. "
            "Use one parameter server (--num_ps=1), or clipnorm or clipvalue instead of global_clipnorm."
        )


def check_local_clipping(optimizers: Sequence[Any]) -> None:
    """For a model with tables. Raises `ModelFileError` for clipping across gradients applied by worker and servers."""
    for optimizer in map(unwrapped, optimizers):
        if optimizer.global_clipnorm:
            raise ModelFileError(
                f"The optimizer {optimizer.name!r} has global_clipnorm, and the model has embedding tables on the "
                "servers. With --updates=local a worker applies all gradients except those of their rows, so it can't "
                "clip them together. Use clipnorm or clipvalue, keras.layers.Embedding, or --updates=async."
            )
