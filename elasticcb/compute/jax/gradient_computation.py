"""Training steps whose gradients go to servers.

Inside the compiled step, pulled weights are sliced from flat blocks, and gradients are packed into one flat array per
server and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elasticcb.compute.backend import GradientComputation, GradientResult, HeldModel, Prepared, TableRows
from elasticcb.compute.clipping import Clipping, clippings
from elasticcb.compute.jax.capture import StatelessCapture
from elasticcb.compute.jax.computation import JAXComputation, Metrics, numbers, put, rows_of, states_of
from elasticcb.compute.jax.steps import values
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.flat_blocks import Blocks, PlacedBlocks, cut_by_dtype, pieces_of
from elasticcb.sharding.partition import Slice


class JAXGradients(JAXComputation, GradientComputation):
    """For the arguments, see `Backend.computation`."""

    def __init__(self, held: HeldModel) -> None:
        trains = getattr(held.model, "optimizer", None) is not None
        super().__init__(held, StatelessCapture(held.model) if trains else None)
        self._averages = MovingAverages(held.model)
        places = {id(variable): index for index, variable in enumerate(held.model.weights)}
        self._other_places = [places.get(id(variable)) for variable in self._others]  # None: belongs to this worker
        self._pushed: tuple[int, ...] = ()  # dense variables with gradients
        self._clipped: Sequence[Clipping] = ()
        self._train: Any = None
        self._follow(held.partition)

    def _follow(self, partition: Sequence[Sequence[Slice]]) -> None:
        """Uses weights from, and packs gradients for, the servers of a partition."""
        self._partition = partition
        if self._capture is not None:
            self._clipped = clippings(self._model, self._specs, [self._capture.optimizer], len(partition))
            self._train = self._compiled(self._train_step)

    def train(self, batch: Prepared, weights: PlacedBlocks, version: int, rows: TableRows) -> GradientResult:
        assert self._capture is not None
        if weights.partition != self._partition:
            self._follow(weights.partition)
        optimizer = self._capture.optimizer
        optimizer.iterations.assign(version)
        state = values(self._others, optimizer.variables)
        padded, metrics = self._served.padded(rows), self._fresh_metrics()
        others, *result = self._train(list(weights), padded, *state, metrics, batch.places, batch.data)
        put(self._others, others)
        logs, states, gradients, of_rows, packed = jax.device_get(result)
        return GradientResult(
            logs=numbers(logs),
            states=states_of(states),
            gradients=_in_own_dtypes(gradients),
            dense_variables=self._pushed,
            rows=rows_of(of_rows, batch.ids),
            state=_in_own_dtypes(packed),
            decays=self._averages.decays,
        )

    def _train_step(
        self, blocks: Blocks, rows: Any, others: Any, optimizer: Any, metrics: Metrics, places: Any, data: Any
    ) -> Any:
        pulled = self._unpacked(blocks) | rows
        trained = [pulled[index] for index in self._trained_places]
        others = [
            own if index is None else pulled[index] for index, own in zip(self._other_places, others, strict=True)
        ]
        with self._averages.counted():
            state = trained, others, optimizer
            logs, (_, others, _), states, gradients = self._traced_train_step(state, metrics, places, data)
        dense = self._clip(gradients)
        of_rows = {index: dense.pop(index) for index in rows if index in dense}
        self._pushed = tuple(sorted(dense))
        moved = {
            index: value
            for index, value in zip(self._other_places, others, strict=True)
            if index is not None and not self._specs[index].trainable
        }
        return others, logs, states, self._packed(dense, True), of_rows, self._packed(moved, False)

    def _clip(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Gradients in the weights' dtypes, clipped by their norm if that is the worker's job."""
        found = {index: gradient.astype(self._specs[index].dtype) for index, gradient in gradients.items()}
        for clipping in self._clipped:
            own = [index for index in found if index in clipping.variables]
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(found[index].astype("float32"))) for index in own))
            scale = clipping.norm / jnp.maximum(norm, clipping.norm)
            found |= {index: (found[index] * scale).astype(found[index].dtype) for index in own}
        return found

    def _unpacked(self, blocks: Blocks) -> dict[int, Any]:
        return {
            index: jnp.reshape(jnp.concatenate(pieces), self._specs[index].shape)
            for index, pieces in pieces_of(blocks, self._specs, self._partition).items()
        }

    def _packed(self, arrays: Mapping[int, Any], trainable: bool) -> list[dict[str, Any]]:
        """Flat blocks by server, like those of `sharding.partition.pack` for arrays."""
        flat = {index: jnp.reshape(array, -1) for index, array in arrays.items()}
        cut = [cut_by_dtype(flat, self._specs, slices, trainable) for slices in self._partition]
        return [{dtype: jnp.concatenate(own) for dtype, own in each.items()} for each in cut]


def _in_own_dtypes(blocks: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Blocks in the dtypes that servers expect: JAX computes in 32 bits unless jax_enable_x64 is set."""
    return [{dtype: flat.astype(dtype_of(dtype), copy=False) for dtype, flat in block.items()} for block in blocks]
