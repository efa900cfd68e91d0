"""Embedding tables whose rows are an argument of the compiled step.

In a step, the value of a table's variable is the batch's rows, padded so that few sizes must be compiled. Its gradient
is the one that the model's step computes for that argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from elasticcb.compute.jax.lookups import Lookups, StepRecording, TracedIds, kind_of, unique_ids
from elasticcb.compute.jax.steps import StatelessStep
from elasticcb.compute.served_tables import ServedTables, not_servable
from elasticcb.errors import ModelFileError
from elasticcb.keras_private import embeddings_of, set_shape_of
from elasticcb.layers.table_layers import TableLayer, answered, is_own
from elasticcb.rpc.tensors import Array, dtype_of

_LEAST_ROWS = 8


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
            kind = kind_of(data)
            if kind not in traced:
                traced[kind] = self._traced(step, data)
            asked: dict[int, list[Array]] = {}
            for table, ids in zip(traced[kind].tables, traced[kind].ids(data), strict=True):
                asked.setdefault(table, []).append(ids)
            found = {table: unique_ids(given) for table, given in sorted(asked.items())}
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


def problems_of(model: keras.Model, step: StatelessStep, data: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    """Why rows can't be determined before a step, by variable; like `movable.FindProblems`, for arrays."""
    recording = StepRecording(layers)
    with answered(layers, recording.lookup):
        return TracedIds(step, recording, data).problems(layers)
