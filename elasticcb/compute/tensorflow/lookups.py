"""Which rows a batch needs, before it is computed; and the step on these rows.

The model's step is traced once while its embedding layers write down the ids that they are asked for. The part of
the graph that leads to ids alone then runs for each batch: it touches no weight, metric or seed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.compute.tensorflow.id_graph import Recording, id_function
from elasticcb.errors import ModelFileError
from elasticcb.layers.table_layers import NotServableError, TableLayer, answer, is_own, stop_answering, table_layers
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.batch_signatures import Signatures, flat_tensors
from elasticcb.tf.row_variables import make_free_rows, make_whole, untouched_zeros

Step = Callable[[Any], Any]
# By table: the unique ids, int64 [n]; for each call of the layer, where among them its ids are, int32 of their shape.
Wanted = dict[int, tuple[tf.Tensor, list[tf.Tensor]]]


class ServedTables:
    """The tables of a model, whose rows come from elsewhere for each step. Made by `serve_tables`."""

    def __init__(self, model: keras.Model, layers: Mapping[int, TableLayer]) -> None:
        self._model = model
        self._layers = layers
        # One thread may look for the ids of the next batch while another one is in a step.
        self._answering = threading.local()
        # The model is traced by one thread at a time.
        self.tracing = threading.RLock()
        self._sizes = {index: tuple(layer._embeddings.shape) for index, layer in layers.items()}
        for index, layer in layers.items():
            if is_own(layer):
                layer.set_rows([])
            else:
                make_free_rows(layer._embeddings)
            answer(layer, self._answer(index, layer))

    def _answer(self, index: int, layer: TableLayer) -> Callable[[tf.Tensor], tf.Tensor]:
        def lookup(ids: tf.Tensor) -> tf.Tensor:
            source = getattr(self._answering, "source", None)
            if source is None:
                raise ModelFileError(
                    f"The model was called outside a step of the job, and with it the embedding layer {layer.name!r}, "
                    "whose rows are on the parameter servers. Call the model in train_step, test_step or predict_step; "
                    "a callback can do so in a hook that runs on the master."
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

    def lookups(self, step: Step) -> Callable[[Any], Wanted]:
        """A function that tells what `step`, of the same batch, looks up.

        It may be called in another thread than the step.

        Args:
            step: takes a batch, of any structure; is traced, once for each structure and kind of batch, never run.

        The function raises:
            NotServableError: ids depend on rows, weights or randomness, or are asked for inside a loop or function.
            ModelFileError: an id is out of range.
        """
        if not self._layers:
            return lambda batch: {}

        def trace(specs: Any) -> Callable[..., Wanted]:
            def recorded(batch: Any) -> Recording:
                recording = Recording(self._layers)
                with self._answered_by(recording):
                    step(batch)
                return recording

            with self.tracing:
                function, recording = id_function(self._model, recorded, specs)
            for index, problem in recording.problems().items():
                raise not_servable(self._layers[index], problem)
            calls = recording.calls()
            order = sorted(calls)

            def wanted(leaves: Sequence[tf.Tensor]) -> Wanted:
                bad, *found = function(leaves)
                if bad.numpy().any():
                    self._raise_out_of_range(order, found, calls)
                result, at = {}, 0
                for index in order:
                    end = at + 1 + calls[index]
                    result[index] = (found[at], found[at + 1 : end])
                    at = end
                return result

            return wanted

        signatures = Signatures(trace)

        def look_up(batch: Any) -> Wanted:
            leaves, key = flat_tensors(batch)
            wanted: Wanted = signatures.function(batch, key)(leaves)
            return wanted

        return look_up

    def _raise_out_of_range(self, order: Sequence[int], found: Sequence[tf.Tensor], calls: Mapping[int, int]) -> None:
        at = 0
        for index in order:
            ids, layer = found[at].numpy(), self._layers[index]
            at += 1 + calls[index]
            limit = np.inf if layer.input_dim is None else layer.input_dim
            outside = ids[(ids < 0) | (ids >= limit)]
            if len(outside):
                below = "" if layer.input_dim is None else f", below its input_dim={layer.input_dim}"
                raise ModelFileError(
                    f"The embedding layer {layer.name!r} was asked for the id {outside[0]}. Expected ids from 0 on"
                    f"{below}. Check `feed`; a larger input_dim, or keras.layers.Hashing or IntegerLookup before the "
                    "layer, takes ids of any size."
                )

    @contextlib.contextmanager
    def serving(self, rows: Mapping[int, Any], positions: Mapping[int, Sequence[Any]]) -> Iterator[None]:
        """Within it, layers take their rows from what was fetched for the batch. For one step.

        Args:
            rows: by table, of its unique ids, [n, dim].
            positions: by table, as `lookups` gives them.
        """
        with self.tracing:
            for index, value in rows.items():
                self._layers[index]._embeddings._value.assign(value)
            serving = _Serving(self._layers, positions)
            with self._answered_by(serving):
                yield
            serving.check()

    def release(self) -> None:
        """Makes the layers native again: without rows (elasticcb.layers), or with all rows zero (Keras's)."""
        for index, layer in self._layers.items():
            stop_answering(layer)
            if is_own(layer):
                layer.set_rows([])
            else:
                make_whole(layer._embeddings, untouched_zeros(self._sizes[index], layer._embeddings.dtype))


class _Serving:
    """Answers the lookups of one step."""

    def __init__(self, layers: Mapping[int, TableLayer], positions: Mapping[int, Sequence[Any]]) -> None:
        self._layers = layers
        self._positions = positions
        self._calls = dict.fromkeys(positions, 0)

    def lookup(self, index: int, ids: tf.Tensor) -> tf.Tensor:
        layer, call = self._layers[index], self._calls.get(index, 0)
        given = self._positions.get(index, ())
        if call >= len(given):
            raise NotServableError(
                f"The step calls the embedding layer {layer.name!r} more often than the {len(given)} times for which "
                "rows were fetched. How often a step calls a layer must not change."
            )
        self._calls[index] = call + 1
        rows = tf.gather(layer._embeddings._value, given[call])
        if not tf.executing_eagerly() and ids.shape.rank is not None:
            rows.set_shape([*ids.shape, layer.output_dim])
        return rows

    def check(self) -> None:
        for index, given in self._positions.items():
            if self._calls[index] < len(given):
                raise NotServableError(
                    f"The step calls the embedding layer {self._layers[index].name!r} {self._calls[index]} times, and "
                    f"rows were fetched for {len(given)} calls. How often a step calls a layer must not change."
                )


def not_servable(layer: TableLayer, problem: str) -> NotServableError:
    return NotServableError(f"Parameter servers can't hold the rows of the embedding layer {layer.name!r}: {problem}")


def serve_tables(model: keras.Model, tables: Mapping[int, TableSpec]) -> ServedTables:
    """Lets the rows of some embedding layers come from parameter servers; the model's own are given up.

    Args:
        model: built.
        tables: by index in `model.weights`.

    Raises:
        ModelFileError: an index is not that of an embedding layer's variable.
    """
    layers = table_layers(model)
    unknown = [model.weights[index].path for index in tables if index not in layers]
    if unknown:
        raise ModelFileError(
            f"{', '.join(map(repr, unknown))} should be held as embedding tables, and are not variables of embedding "
            "layers in this process's model. custom_model() must give the same model in every process."
        )
    return ServedTables(model, {index: layers[index][0] for index in tables})
