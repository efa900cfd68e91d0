"""Determines which rows a batch needs before it is computed.

The model's step is traced once for each kind of batch, while its embedding layers record the requested ids. The part of
the trace that leads to ids then runs for each batch: it depends only on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from elasticcb.compute import unknown_ids
from elasticcb.compute.jax.steps import StatelessStep
from elasticcb.keras_private import embeddings_of
from elasticcb.layers.table_layers import TableLayer
from elasticcb.rpc.tensors import Array

# Older releases have it as experimental.
_enable_x64: Any = vars(jax if hasattr(jax, "enable_x64") else jax.experimental)["enable_x64"]


class StepRecording:
    """Records the layers' lookups while a step is traced, and returns placeholder rows."""

    def __init__(self, layers: Mapping[int, TableLayer]) -> None:
        self._layers = layers
        self._stand_in: Any = 0.0
        self.asked: list[tuple[int, Any]] = []  # (table, ids)

    def begin(self, stand_in: Any) -> None:
        """A step is traced from now on; its use of rows depends on `stand_in`."""
        self.asked, self._stand_in = [], stand_in

    def lookup(self, index: int, ids: Any) -> Any:
        layer: Any = self._layers[index]
        self.asked.append((index, ids))
        return jnp.zeros((*ids.shape, layer.output_dim), layer.variable_dtype) + self._stand_in.astype(
            layer.variable_dtype
        )


class TracedIds:
    """The lookups of a step, as a function of a batch of one kind.

    Args:
        step: the model's step; its layers call `recording`, which is given the placeholders.

    Attributes:
        tables: table of each lookup of the step, in order.
    """

    def __init__(self, step: StatelessStep, recording: StepRecording, data: Any) -> None:
        self._variables = [variable for group in step.variables() for variable in group]
        state = keras.tree.map_structure(_shape_of, tuple(map(list, step.variables())))

        def traced(state: Any, stand_in: Any, data: Any) -> Any:
            recording.begin(stand_in)
            rest = step.run(state, data)
            return [ids for _, ids in recording.asked], rest

        try:
            # Ids may exceed JAX's default integer range.
            with _enable_x64(True), keras.StatelessScope():
                self._whole = jax.make_jaxpr(traced)(state, jax.ShapeDtypeStruct((), "float32"), data)
        except jax.errors.UnexpectedTracerError:
            self.tables: list[int] = []
            self._in_loop = bool(recording.asked)
            return
        self._in_loop = False
        self.tables = [index for index, _ in recording.asked]
        part, used = self._part(range(len(self.tables)))
        leaves = self._of_data(used)
        self._compiled = jax.jit(jaxpr_as_fun(ClosedJaxpr(part, self._whole.consts)))
        self._leaves = leaves

    def _part(self, outputs: Sequence[int]) -> tuple[Any, list[bool]]:
        """The part that leads to some outputs, and the inputs it needs."""
        jaxpr = self._whole.jaxpr
        wanted = [place in outputs for place in range(len(jaxpr.outvars))]
        part, used = dce_jaxpr(jaxpr, wanted)
        return part, list(used)

    def _of_data(self, used: Sequence[bool]) -> list[int]:
        first = len(self._variables) + 1  # after the state and the placeholder
        return [place - first for place, is_used in enumerate(used) if is_used and place >= first]

    def problems(self, layers: Mapping[int, TableLayer]) -> dict[int, str]:
        """Why rows can't be determined before the step, by table."""
        if self._in_loop:
            return dict.fromkeys(layers, unknown_ids.IN_A_LOOP)
        found = {index: self._problem_of(index, layer) for index, layer in layers.items()}
        return {index: problem for index, problem in found.items() if problem}

    def _problem_of(self, index: int, layer: TableLayer) -> str:
        _, by_rest = self._part(range(len(self.tables), len(self._whole.jaxpr.outvars)))
        place = next(place for place, variable in enumerate(self._variables) if variable is embeddings_of(layer))
        if by_rest[place]:
            return unknown_ids.OTHER_USES
        _, used = self._part([place for place, table in enumerate(self.tables) if table == index])
        if used[len(self._variables)]:
            return unknown_ids.BY_ROWS
        for variable, is_used in zip(self._variables, used, strict=False):
            if is_used:
                reason = unknown_ids.by_weights if variable.trainable else unknown_ids.by_changed
                return reason(variable.path)
        return ""

    def ids(self, data: Any) -> list[Array]:
        """The ids of each lookup, int64, for a batch of this kind."""
        leaves = jax.tree.leaves(data)
        with _enable_x64(True):
            found = self._compiled(*(leaves[place] for place in self._leaves))
        return [np.asarray(ids).astype(np.int64) for ids in found]


def kind_of(data: Any) -> Any:
    """A key for batches that need separate traces of a step."""
    leaves, structure = jax.tree.flatten(data)
    return structure, *((leaf.shape, leaf.dtype.str) for leaf in leaves)


def unique_ids(asked: Sequence[Array]) -> tuple[Array, list[Array]]:
    """The unique ids of some lookups, in order, and each lookup's positions among them, int32 of its shape."""
    unique, places = np.unique(np.concatenate([ids.reshape(-1) for ids in asked]), return_inverse=True)
    ends = np.cumsum([ids.size for ids in asked])
    parts = np.split(places.reshape(-1).astype(np.int32), ends[:-1])
    return unique, [part.reshape(ids.shape) for part, ids in zip(parts, asked, strict=True)]


def _shape_of(variable: keras.Variable) -> Any:
    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)


Lookups = Callable[[Any], dict[int, tuple[Array, list[Array]]]]
