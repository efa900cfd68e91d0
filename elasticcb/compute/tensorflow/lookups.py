"""Determines which rows a batch needs before it is computed; and runs the step on these rows.

The model's step is traced once while its embedding layers record the requested ids. The part of the graph that leads to
ids then runs for each batch: it uses no weight, metric or seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from elasticcb.compute.served_tables import ServedTables, not_servable
from elasticcb.compute.tensorflow.id_graph import Recording, id_function
from elasticcb.keras_private import embeddings_of, value_of
from elasticcb.layers.table_layers import TableLayer
from elasticcb.tf.batch_signatures import Fixed, Signatures, flat_tensors

Step = Callable[[Any], Any]
# By table: the unique ids, int64 [n]; for each call of the layer, the positions of its ids among them, int32 of their
# shape.
Wanted = dict[int, tuple[tf.Tensor, list[tf.Tensor]]]


class TensorFlowTables(ServedTables):
    """For the arguments, see `ServedTables`."""

    def lookups(self, step: Step, fixed: Callable[[], Fixed] = tuple) -> Callable[[Any], Wanted]:
        """A function that returns the lookups of `step` for a batch.

        It may be called in another thread than the step.

        Args:
            step: a function of a batch, of any structure; traced once for each structure and kind of batch, never run.
            fixed: as in `CompiledStep`.

        The function raises:
            NotServableError: ids depend on rows, weights or randomness, or are looked up inside a loop or function.
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
                result, at = {}, 0
                for index in order:
                    end = at + 1 + calls[index]
                    result[index] = (found[at], found[at + 1 : end])
                    at = end
                if bad.numpy().any():
                    for index, (ids, _) in result.items():
                        self.check_range(index, ids.numpy())
                return result

            return wanted

        signatures = Signatures(trace)

        def look_up(batch: Any) -> Wanted:
            leaves, key = flat_tensors(batch, fixed())
            wanted: Wanted = signatures.function(batch, key, fixed())(leaves)
            return wanted

        return look_up

    def _hold(self, layer: TableLayer, rows: Any) -> None:
        value_of(embeddings_of(layer)).assign(rows)

    def _gather(self, layer: TableLayer, places: Any, ids: Any) -> Any:
        rows = tf.gather(value_of(embeddings_of(layer)), places)
        if not tf.executing_eagerly() and ids.shape.rank is not None:
            rows.set_shape([*ids.shape, layer.output_dim])
        return rows
