"""Determines which rows a batch needs before it is computed; and runs the step on these rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import torch

from elasticcb.compute.movable import Step
from elasticcb.compute.served_tables import ServedTables, not_servable
from elasticcb.compute.torch.arrays import array_of, tensor_of
from elasticcb.compute.torch.recording import IdRecording, Uses
from elasticcb.keras_private import embeddings_of, set_value_of, value_of
from elasticcb.layers.table_layers import NotServableError, TableLayer, answered
from elasticcb.rpc.tensors import Array

# By table: the unique ids, int64 [n]; for each call of the layer, the positions of its ids among them, int64 of their
# shape.
Wanted = dict[int, tuple[Array, list[torch.Tensor]]]


class TorchTables(ServedTables):
    """For the arguments, see `ServedTables`."""

    def __init__(self, model: keras.Model, tables: Iterable[int]) -> None:
        super().__init__(model, tables)
        # PyTorch lists these as the model's parameters; the tensors of a step are not among them.
        self._listed = {index: value_of(embeddings_of(layer)) for index, layer in self._layers.items()}

    def release(self) -> None:
        for index, layer in self._layers.items():
            set_value_of(embeddings_of(layer), self._listed[index])
        super().release()

    def lookups(self, step: Step) -> Callable[[Any], Wanted]:
        """A function that returns the lookups of `step` for a batch.

        It may be called in another thread than the step.

        Args:
            step: a function of a batch, of any structure. It is run completely once for each structure and kind of
                batch, and up to its last lookup for each batch; this changes nothing.

        The function raises:
            NotServableError: ids depend on rows, weights or randomness.
            ModelFileError: an id is out of range.
        """
        if not self._layers:
            return lambda batch: {}
        known: dict[Any, dict[int, int]] = {}  # by kind of batch, how often each table is looked up

        def look_up(batch: Any) -> Wanted:
            kind = _kind(batch)
            with self.tracing:
                if kind not in known:
                    known[kind] = self._calls(step, batch)
                calls = known[kind]
                recording = IdRecording(self._layers, calls)
                if calls:
                    with self._answered_by(recording):
                        recording.run(self._model, step, batch)
            if {index: len(asked) for index, asked in recording.asked.items()} != calls:
                raise NotServableError(
                    "The step does not call its embedding layers as often as before. The number of calls must "
                    "not change."
                )
            wanted = {index: _unique(recording.asked[index]) for index in sorted(calls)}
            for index, (ids, _) in wanted.items():
                self.check_range(index, ids)
            return wanted

        return look_up

    def _calls(self, step: Step, batch: Any) -> dict[int, int]:
        uses = Uses(self._model, self._layers)
        with self._answered_by(uses):
            uses.run(self._model, step, batch)
        for index, problem in uses.problems().items():
            raise not_servable(self._layers[index], problem)
        return {index: len(asked) for index, asked in uses.asked.items()}

    def _hold(self, layer: TableLayer, rows: Array) -> None:
        variable: Any = embeddings_of(layer)
        set_value_of(variable, torch.nn.Parameter(tensor_of(rows), requires_grad=variable.trainable))

    def _gather(self, layer: TableLayer, places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(places, value_of(embeddings_of(layer)))


def problems_of(model: keras.Model, step: Step, batch: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    """Why rows can't be determined before a step of `batch`, which is run, by variable; see `FindProblems`."""
    uses = Uses(model, layers)
    try:
        with answered(layers, uses.lookup):
            uses.run(model, step, batch)
    except Exception:
        if not uses.problems():  # otherwise they explain why it fails with placeholder rows
            raise
    return uses.problems()


def _unique(asked: list[torch.Tensor]) -> tuple[Array, list[torch.Tensor]]:
    flat = torch.cat([ids.reshape(-1).to(torch.int64) for ids in asked])
    unique, places = torch.unique(flat, return_inverse=True)
    parts = places.split([ids.numel() for ids in asked])
    return array_of(unique), [part.reshape(ids.shape) for part, ids in zip(parts, asked, strict=True)]


def _kind(batch: Any) -> Any:
    """A key for batches whose steps may call other layers."""
    leaves, structure = torch.utils._pytree.tree_flatten(batch)
    return str(structure), tuple((leaf.dtype, leaf.ndim) for leaf in leaves if leaf is not None)
