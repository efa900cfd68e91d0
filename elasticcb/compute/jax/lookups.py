"""Determines which rows a batch needs before it is computed; and runs the step on these rows.

The model's step is traced once for each kind of batch, while its embedding layers record the requested ids. The part of
the trace that leads to ids then runs for each batch: it depends only on the batch.

In a step, the value of a table's variable is the batch's rows, padded so that few sizes must be compiled. Its gradient
is the one that the model's step computes for that argument.
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

from elasticcb.compute import served_tables
from elasticcb.compute.jax.steps import StatelessStep
from elasticcb.compute.served_tables import ServedTables, not_servable
from elasticcb.errors import ModelFileError
from elasticcb.keras_private import embeddings_of, set_shape_of
from elasticcb.layers.table_layers import TableLayer, answered, is_own
from elasticcb.rpc.tensors import Array, dtype_of

# Older releases have it as experimental.
_enable_x64: Any = vars(jax if hasattr(jax, "enable_x64") else jax.experimental)["enable_x64"]
_LEAST_ROWS = 8


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
        self._compiled = jax.jit(jaxpr_as_fun(ClosedJaxpr(part, self._whole.consts)))
        first = len(self._variables) + 1  # after the state and the placeholder
        self._leaves = [place for place, is_used in enumerate(used[first:]) if is_used]

    def _part(self, outputs: Sequence[int]) -> tuple[Any, list[bool]]:
        """The part that leads to some outputs, and the inputs it needs."""
        jaxpr = self._whole.jaxpr
        wanted = [place in outputs for place in range(len(jaxpr.outvars))]
        part, used = dce_jaxpr(jaxpr, wanted)
        return part, list(used)

    def problems(self, layers: Mapping[int, TableLayer]) -> dict[int, str]:
        """Why rows can't be determined before the step, by table."""
        if self._in_loop:
            return dict.fromkeys(layers, served_tables.IN_A_LOOP)
        found = {index: self._problem_of(index, layer) for index, layer in layers.items()}
        return {index: problem for index, problem in found.items() if problem}

    def _problem_of(self, index: int, layer: TableLayer) -> str:
        _, by_rest = self._part(range(len(self.tables), len(self._whole.jaxpr.outvars)))
        place = next(place for place, variable in enumerate(self._variables) if variable is embeddings_of(layer))
        if by_rest[place]:
            return served_tables.OTHER_USES
        _, used = self._part([place for place, table in enumerate(self.tables) if table == index])
        if used[len(self._variables)]:
            return served_tables.BY_ROWS
        for variable, is_used in zip(self._variables, used, strict=False):
            if is_used:
                reason = served_tables.by_weights if variable.trainable else served_tables.by_changed
                return reason(variable.path)
        return ""

    def ids(self, data: Any) -> list[Array]:
        """The ids of each lookup, int64, for a batch of this kind."""
        leaves = jax.tree.leaves(data)
        with _enable_x64(True):
            found = self._compiled(*(leaves[place] for place in self._leaves))
        return [np.asarray(ids).astype(np.int64) for ids in found]


def _kind_of(data: Any) -> Any:
    """A key for batches that need separate traces of a step."""
    leaves, structure = jax.tree.flatten(data)
    return structure, *((leaf.shape, leaf.dtype.str) for leaf in leaves)


def _unique_ids(asked: Sequence[Array]) -> tuple[Array, list[Array]]:
    """The unique ids of some lookups, in order, and each lookup's positions among them, int32 of its shape."""
    unique, places = np.unique(np.concatenate([ids.reshape(-1) for ids in asked]), return_inverse=True)
    ends = np.cumsum([ids.size for ids in asked])
    parts = np.split(places.reshape(-1).astype(np.int32), ends[:-1])
    return unique, [part.reshape(ids.shape) for part, ids in zip(parts, asked, strict=True)]


def _shape_of(variable: keras.Variable) -> Any:
    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)


Lookups = Callable[[Any], dict[int, tuple[Array, list[Array]]]]


class JAXTables(ServedTables):
    """For the arguments, see `ServedTables`."""

    def lookups(self, step: StatelessStep) -> Lookups:
        """A function that returns the lookups of a step for a batch: by table, the unique ids, and the positions of
        each lookup's ids among them. It may be called in another thread than the step.

        The function raises:
            NotServableError: ids depend on rows, weights or randomness, or are looked up inside a loop or function.
            ModelFileError: an id is out of range.
        """
        if not self._layers:
            return lambda data: {}
        traced: dict[Any, TracedIds] = {}

        def look_up(data: Any) -> dict[int, tuple[Array, list[Array]]]:
            kind = _kind_of(data)
            if kind not in traced:
                traced[kind] = self._traced(step, data)
            asked: dict[int, list[Array]] = {}
            for table, ids in zip(traced[kind].tables, traced[kind].ids(data), strict=True):
                asked.setdefault(table, []).append(ids)
            found = {table: _unique_ids(given) for table, given in sorted(asked.items())}
            for table, (ids, _) in found.items():
                self.check_range(table, ids)
            return found

        return look_up

    def _traced(self, step: StatelessStep, data: Any) -> TracedIds:
        recording = StepRecording(self._layers)
        with self.tracing, self._answered_by(recording):
            ids = TracedIds(step, recording, data)
        for index, problem in ids.problems(self._layers).items():
            raise not_servable(self._layers[index], problem)
        return ids

    def check_range(self, index: int, ids: Array) -> None:
        super().check_range(index, ids)
        layer = self._layers[index]
        # The step compares ids with 0 in 32 bits.
        like_padding = ids[(ids != 0) & (ids % 2**32 == 0)]
        if is_own(layer) and layer.mask_zero and len(like_padding) and not jax.config.read("jax_enable_x64"):
            raise ModelFileError(
                f"The embedding layer {layer.name!r} has mask_zero=True and was called with the id {like_padding[0]}, "
                "a multiple of 2**32, which JAX can't distinguish from the padding id 0. Set JAX_ENABLE_X64=1, or hash "
                "ids differently."
            )

    def padded(self, rows: Mapping[int, Array]) -> dict[int, Array]:
        """The rows of all tables in a step: those of a batch, padded with zeros to a power of two."""
        found = {}
        for index, layer in self._layers.items():
            given = rows.get(index, np.zeros((0, layer.output_dim), dtype_of(embeddings_of(layer).dtype)))
            size = max(_LEAST_ROWS, 1 << max(0, len(given) - 1).bit_length())
            found[index] = np.zeros((size, layer.output_dim), given.dtype)
            found[index][: len(given)] = given
        return found

    def _hold(self, layer: TableLayer, rows: Any) -> None:
        # The value belongs to the step; Keras compares its shape with that of the variable.
        set_shape_of(embeddings_of(layer), rows.shape)

    def _gather(self, layer: TableLayer, places: Any, ids: Any) -> Any:
        return jnp.take(embeddings_of(layer).value, places, axis=0, mode="clip")


def problems_of(model: keras.Model, step: Any, data: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    """Why rows can't be determined before a `StatelessStep`, by variable; see `FindProblems`."""
    recording = StepRecording(layers)
    with answered(layers, recording.lookup):
        return TracedIds(step, recording, data).problems(layers)
