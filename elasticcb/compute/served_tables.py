"""Provides the rows of embedding tables for each step, for its batch; and says why servers can't hold a table where a
batch's rows are not known before its step runs.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elasticcb.errors import ModelFileError
from elasticcb.keras_private import embeddings_of
from elasticcb.layers.table_layers import (
    NotServableError,
    TableLayer,
    answer,
    empty,
    make_native,
    stop_answering,
    table_layers,
)
from elasticcb.process.wording import how_many
from elasticcb.rpc.tensors import Array

OTHER_USES = (
    "the step uses its variable in other ways than by calling the layer (as the weights of an output layer, in a loss, "
    "in an assignment), for which all rows are needed."
)
IN_A_LOOP = (
    "it is called inside a loop, a condition or a function of its own (a layer that runs an inner layer step by step, "
    "such as TimeDistributed; keras.ops.cond, scan, while_loop, map; @tf.function), where its ids can't be known "
    "before the step runs. Call it from the model's `call` itself, on the ids of all steps at once: it takes ids of "
    "any shape."
)
BY_ROWS = (
    "its ids depend on rows of an embedding, so that they can't be known before these rows are there. Compute ids only "
    "from the features."
)


def by_weights(path: str) -> str:
    return (
        f"its ids depend on the weights {path!r}, which change from step to step. Compute ids only from the features."
    )


def by_changed(what: str) -> str:
    """For a variable that the step itself changes, as the state of random numbers."""
    return (
        f"its ids depend on {what}, which the step changes. Compute ids only from the features; draw random ids in "
        "the input pipeline."
    )


class ServedTables(ABC):
    """The tables of a model, whose rows are provided for each step.

    Raises:
        ModelFileError: an index is not that of an embedding layer's variable.
    """

    def __init__(self, model: keras.Model, tables: Iterable[int]) -> None:
        self._model = model
        self._layers = layers = _layers_of(model, tables)
        # One thread may determine the ids of the next batch while another runs a step.
        self._answering = threading.local()
        # The model is traced, or run, by one thread at a time.
        self.tracing = threading.RLock()
        self._sizes = {index: tuple(embeddings_of(layer).shape) for index, layer in layers.items()}
        for index, layer in layers.items():
            empty(layer)
            answer(layer, self._answer(index, layer))

    def _answer(self, index: int, layer: TableLayer) -> Callable[[Any], Any]:
        def lookup(ids: Any) -> Any:
            source = getattr(self._answering, "source", None)
            if source is None:
                raise ModelFileError(
                    f"The model was called outside a step of the job, but its embedding layer {layer.name!r} has its "
                    "rows on the parameter servers. Call the model in train_step, test_step or predict_step; a "
                    "callback can do so in a hook that runs on the master."
                )
            return source.lookup(index, ids)

        return lookup

    @contextlib.contextmanager
    def _answered_by(self, source: Any) -> Iterator[None]:
        before = getattr(self._answering, "source", None)
        self._answering.source = source
        try:
            yield
        finally:
            self._answering.source = before

    def check_range(self, index: int, ids: Array) -> None:
        """Raises `ModelFileError` when an id is out of range."""
        layer = self._layers[index]
        limit = np.inf if layer.input_dim is None else layer.input_dim
        outside = ids[(ids < 0) | (ids >= limit)]
        if len(outside):
            below = "" if layer.input_dim is None else f", below its input_dim={layer.input_dim}"
            raise ModelFileError(
                f"The embedding layer {layer.name!r} was called with the id {outside[0]}. Expected ids from 0"
                f"{below}. Check the data, use a larger input_dim, or put keras.layers.Hashing or IntegerLookup in "
                "front of the layer."
            )

    @contextlib.contextmanager
    def serving(self, rows: Mapping[int, Any], positions: Mapping[int, Sequence[Any]]) -> Iterator[None]:
        """Inside the context, layers use the rows fetched for the batch. For one step.

        Args:
            rows: by table, rows of its unique ids, [n, dim].
            positions: by table, as returned by `lookups`.
        """
        with self.tracing:
            for index, value in rows.items():
                self._hold(self._layers[index], value)
            serving = _Serving(self._layers, positions, self._gather)
            with self._answered_by(serving):
                yield
            serving.check()

    def release(self) -> None:
        """Restores the layers: without rows (elasticcb.layers), or with all rows zero (Keras's)."""
        for index, layer in self._layers.items():
            stop_answering(layer)
            make_native(layer, self._sizes[index])

    @abstractmethod
    def _hold(self, layer: TableLayer, rows: Any) -> None:
        """Sets a layer's rows for a step, [n, dim]."""

    @abstractmethod
    def _gather(self, layer: TableLayer, places: Any, ids: Any) -> Any:
        """The rows, [..., dim], at `places` [...] among the layer's rows; `ids` are the requested ids."""


class _Serving:
    """Answers the lookups of one step."""

    def __init__(
        self,
        layers: Mapping[int, TableLayer],
        positions: Mapping[int, Sequence[Any]],
        gather: Callable[[TableLayer, Any, Any], Any],
    ) -> None:
        self._layers, self._gather = layers, gather
        self._positions = positions
        self._calls = dict.fromkeys(positions, 0)

    def lookup(self, index: int, ids: Any) -> Any:
        layer, call = self._layers[index], self._calls.get(index, 0)
        given = self._positions.get(index, ())
        if call >= len(given):
            raise NotServableError(
                f"The step calls the embedding layer {layer.name!r} more than the "
                f"{how_many(len(given), 'time')} for which rows were fetched. The number of calls must not change."
            )
        self._calls[index] = call + 1
        return self._gather(layer, given[call], ids)

    def check(self) -> None:
        for index, given in self._positions.items():
            if self._calls[index] < len(given):
                raise NotServableError(
                    f"The step calls the embedding layer {self._layers[index].name!r} "
                    f"{how_many(self._calls[index], 'time')}, but rows were fetched for "
                    f"{how_many(len(given), 'call')}. The number of calls must not change."
                )


def not_servable(layer: TableLayer, problem: str) -> NotServableError:
    return NotServableError(f"Parameter servers can't hold the rows of the embedding layer {layer.name!r}: {problem}")


def _layers_of(model: keras.Model, tables: Iterable[int]) -> dict[int, TableLayer]:
    layers = table_layers(model)
    unknown = [model.weights[index].path for index in tables if index not in layers]
    if unknown:
        raise ModelFileError(
            f"{', '.join(map(repr, unknown))} should be embedding tables, but are not variables of embedding layers in "
            "this process's model. The model must be the same in every process."
        )
    return {index: layers[index][0] for index in tables}
