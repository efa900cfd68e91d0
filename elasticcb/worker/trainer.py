"""One compiled function per kind of batch, around the model's own `train_step` and friends.

The optimizer's `apply` is replaced by one that keeps what it is given, so that the gradients of the
traced step come out of the function as outputs instead of being applied. Pulled weights are assigned,
and gradients packed into one flat array per server and dtype, inside the same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import ModelFileError
from elasticcb.metric_messages import States
from elasticcb.metrics import ModelMetrics, Transport, to_number
from elasticcb.model_weights import variable_specs
from elasticcb.ps.partition import Slice, layout
from elasticcb.ps_client import Blocks, Push


@dataclass
class TrainResult:
    """A training step: what to push, the batch's own logs, and its metric states."""

    push: Push
    logs: dict[str, Any]
    states: States


class Trainer:
    """Runs batches of one model.

    Args:
        model: a built model, compiled if it is to be trained.
        metrics: the model's metrics.
        partition: by server, the slices of `model.weights` that it holds.
    """

    def __init__(self, model: keras.Model, metrics: ModelMetrics, partition: Sequence[Sequence[Slice]]) -> None:
        self.model = model
        self._metrics = metrics
        self._partition = partition
        self._specs = variable_specs(model)
        self._captured: list[tuple[Any, Any]] = []
        self._dense_variables: tuple[int, ...] = ()
        if getattr(model, "optimizer", None) is not None:
            model.optimizer.apply = self._capture
        self._train = tf.function(self._train_step, autograph=False, reduce_retracing=True)
        self._test = tf.function(self._test_step, autograph=False, reduce_retracing=True)
        self._predict = tf.function(self._predict_step, autograph=False, reduce_retracing=True)
        self._assign = tf.function(self._assign_blocks, autograph=False)
        if getattr(model, "run_eagerly", False):
            self._train, self._test, self._predict = self._train_step, self._test_step, self._predict_step

    def train(self, batch: Any, blocks: Blocks) -> TrainResult:
        """Gradients of `batch`, `(features, labels[, sample_weight])`, at the weights `blocks`."""
        logs, states, gradients, rows, deltas, finite = self._train(batch, blocks)
        push = Push(
            gradients=_to_numpy(gradients),
            dense_variables=self._dense_variables,
            rows={index: (ids.numpy(), values.numpy()) for index, (ids, values) in rows.items()},
            state_deltas=[
                {dtype: delta for dtype, delta in server.items() if delta.any()} for server in _to_numpy(deltas)
            ],
            loss=float(logs["loss"]) if "loss" in logs else 0.0,
        )
        if not finite:
            push.non_finite = self._find_non_finite(push)
        return TrainResult(push, {name: to_number(value) for name, value in logs.items()}, _to_numpy(states))

    def evaluate(self, batch: Any) -> tuple[dict[str, Any], Any]:
        """Adds `batch` to the metrics; returns present logs, and `(labels, predictions, weight)` if a metric
        needs them to travel."""
        logs, outputs = self._test(batch)
        outputs = tf.nest.map_structure(lambda tensor: tensor.numpy(), outputs)
        return {name: to_number(value) for name, value in logs.items()}, outputs

    def predict(self, features: Any) -> Any:
        """The model's outputs for a batch of features, as NumPy arrays."""
        return tf.nest.map_structure(_as_array, self._predict(features))

    def assign(self, blocks: Blocks) -> None:
        """Sets the model's weights."""
        self._assign(blocks)

    def _capture(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if trainable_variables is None:
            trainable_variables = self.model.trainable_weights
        self._captured += list(zip(grads, trainable_variables, strict=True))

    def _train_step(self, batch: Any, blocks: Any) -> Any:
        self._assign_blocks(blocks)
        self._metrics.reset()
        self._captured.clear()
        logs = self.model.train_step(batch)
        states = self._metrics.state_tensors()
        dense, rows = self._sort_gradients()
        self._dense_variables = tuple(dense)
        gradients = [self._pack(server, dense, trainable=True) for server in self._partition]
        state = {i: v.value for i, v in enumerate(self.model.weights) if not self._specs[i].trainable}
        deltas = [
            {
                dtype: _difference(flat, blocks[server][f"state/{dtype}"])
                for dtype, flat in self._pack(slices, state, trainable=False).items()
            }
            for server, slices in enumerate(self._partition)
        ]
        checked = [flat for server in gradients + deltas for flat in server.values() if flat.dtype.is_floating]
        checked += [values for _, values in rows.values()]
        checked += [logs["loss"]] if "loss" in logs else []
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in checked])
        return logs, states, gradients, rows, deltas, finite

    def _test_step(self, batch: Any) -> Any:
        outputs: Any = ()
        if Transport.OUTPUTS in self._metrics.transports().values():
            inner = self.model.compute_metrics

            def keep(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
                nonlocal outputs
                outputs = (y, y_pred) if sample_weight is None else (y, y_pred, sample_weight)
                return inner(x, y, y_pred, sample_weight)

            self.model.compute_metrics = keep
            try:
                return self.model.test_step(batch), outputs
            finally:
                self.model.compute_metrics = inner
        return self.model.test_step(batch), outputs

    def _predict_step(self, features: Any) -> Any:
        return self.model.predict_step((features,))

    def _assign_blocks(self, blocks: Any) -> None:
        parts: dict[int, list[tuple[int, Any]]] = {}
        for server, slices in enumerate(self._partition):
            for prefix, trainable in (("weights", True), ("state", False)):
                for part, dtype, offset in layout(self._specs, slices, trainable):
                    piece = blocks[server][f"{prefix}/{dtype}"][offset : offset + part.elements]
                    parts.setdefault(part.variable, []).append((part.start, piece))
        for index, found in parts.items():
            pieces = [piece for _, piece in sorted(found, key=lambda item: item[0])]
            whole = pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
            self.model.weights[index].assign(tf.reshape(whole, self._specs[index].shape))

    def _sort_gradients(self) -> tuple[dict[int, Any], dict[int, tuple[Any, Any]]]:
        """Dense gradients and unique rows by variable, clipped by their global norm if the optimizer says so."""
        indices = {id(variable): index for index, variable in enumerate(self.model.weights)}
        variables, gradients = [], []
        for gradient, variable in self._captured:
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                ids, positions = tf.unique(tf.cast(tf.reshape(gradient.indices, [-1]), tf.int64))
                values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(ids))
                gradient = tf.IndexedSlices(values, ids, gradient.dense_shape)
            variables.append(indices[id(variable)])
            gradients.append(gradient)
        if not gradients:
            raise ModelFileError(
                "The model's train_step gave the optimizer no gradients. Either no layer is trainable, or the "
                "loss does not depend on the weights."
            )
        clip_norm = getattr(self.model.optimizer, "global_clipnorm", None)
        if clip_norm:
            # Here, because a server sees only its own part of the gradients.
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm)
        dense: dict[int, Any] = {}
        rows: dict[int, tuple[Any, Any]] = {}
        for index, gradient in sorted(zip(variables, gradients, strict=True), key=lambda item: item[0]):
            if isinstance(gradient, tf.IndexedSlices):
                rows[index] = (gradient.indices, gradient.values)
            else:
                dense[index] = gradient
        return dense, rows

    def _pack(self, slices: Sequence[Slice], tensors: Mapping[int, Any], trainable: bool) -> dict[str, Any]:
        pieces: dict[str, list[Any]] = {}
        for part, dtype, _ in layout(self._specs, slices, trainable, tensors.keys()):
            flat = tf.reshape(tensors[part.variable], [-1])
            pieces.setdefault(dtype, []).append(flat[part.start : part.stop])
        return {dtype: tf.concat(flat, 0) if len(flat) > 1 else flat[0] for dtype, flat in pieces.items()}

    def _find_non_finite(self, push: Push) -> str:
        if not np.isfinite(push.loss):
            return "the loss"
        for index, (_, values) in push.rows.items():
            if not np.isfinite(values.astype(np.float64)).all():
                return f"the gradient of {self._specs[index].path!r}"
        for slices, gradients, deltas in zip(self._partition, push.gradients, push.state_deltas, strict=True):
            for part, dtype, offset in layout(self._specs, slices, True, push.dense_variables):
                if not np.isfinite(gradients[dtype][offset : offset + part.elements].astype(np.float64)).all():
                    return f"the gradient of {self._specs[part.variable].path!r}"
            for part, dtype, offset in layout(self._specs, slices, False):
                delta = deltas.get(dtype)
                if delta is not None and not np.isfinite(delta[offset : offset + part.elements].astype(float)).all():
                    return f"the new value of {self._specs[part.variable].path!r}"
        return ""


def _difference(new: Any, old: Any) -> Any:
    """What the servers add to the old state to get the new one; booleans are flipped where it is true."""
    return tf.math.logical_xor(new, old) if new.dtype.is_bool else new - old


def _to_numpy(structure: Any) -> Any:
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), structure)


def _as_array(tensor: Any) -> Any:
    return tensor.numpy() if hasattr(tensor, "numpy") else tensor
