"""One compiled function per kind of batch, around the model's own `train_step` and friends.

The optimizers keep what they are given (elasticcb/optimizers/capture.py), so that the gradients of the
traced step come out of the function as outputs instead of being applied. Pulled weights are assigned,
and gradients packed into one flat array per server and dtype, inside the same function.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.compute.compiled_step import CompiledStep
from elasticcb.compute.convert import array_of, not_cached, tensor_of
from elasticcb.errors import ModelFileError
from elasticcb.layers.install import install
from elasticcb.layers.lookups import Wanted, serve_tables
from elasticcb.model.metric_messages import States
from elasticcb.model.metrics import MetricTransport, ModelMetrics, to_number
from elasticcb.optimizers.capture import OptimizerCapture
from elasticcb.optimizers.loss_scale import LossScale
from elasticcb.optimizers.traits import unwrapped
from elasticcb.rpc.tensors import Array, all_finite
from elasticcb.settings import Mode, WireDtype
from elasticcb.sharding.array_names import STATE, WEIGHTS, of_kind
from elasticcb.sharding.flat_blocks import Blocks, PlacedBlocks, state_moves
from elasticcb.sharding.partition import Slice, VariableSpec, layout
from elasticcb.sharding.push import Gradients
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.worker.assignments import refused_assignments
from elasticcb.worker.gradients import clippings, sort_gradients
from elasticcb.worker.moving_averages import MovingAverages
from elasticcb.worker.table_files import collect

logger = logging.getLogger(__name__)

TableRows = Mapping[int, Array]  # by table: [n, dim]

_NOT_COMPILABLE = re.compile(r"XLA|unsupported operations|compile-time constant|uncompilable", re.IGNORECASE)


@dataclass
class TrainResult:
    """A training step: what to push, the batch's own logs, and its metric states."""

    push: Gradients
    logs: dict[str, Any]
    states: States
    # Why there is nothing to push: the scaled loss has gradients that are not finite. What the step did to
    # non-trainable variables (moving statistics) is then left out, too; its metrics count, as in `fit`.
    overflow: str = ""


class Trainer:
    """Runs batches of one model.

    Args:
        model: a built model, compiled if it is to be trained.
        metrics: the model's metrics.
        specs: of `model.weights`, as the master gives them.
        partition: by server, the slices of `model.weights` that it holds.
        wire_dtype: of gradients; those of another dtype than float32 are left as they are.

    Attributes:
        lookups: by mode, which rows of embedding tables a batch needs: a
            function from the batch to `Wanted`. Safe to call from another thread than the rest.
    """

    def __init__(
        self,
        model: keras.Model,
        metrics: ModelMetrics,
        specs: Sequence[VariableSpec],
        partition: Sequence[Sequence[Slice]],
        wire_dtype: WireDtype = WireDtype.SAME,
    ) -> None:
        self.model = model
        self._rounds = wire_dtype is WireDtype.BFLOAT16
        self._metrics = metrics
        self._specs = specs
        self._partition = partition
        self._capture = OptimizerCapture(model)
        self._clipped = clippings(model, specs, self._capture.optimizers, len(partition))
        self._scales = [LossScale(optimizer) for optimizer in self._capture.optimizers]
        self._averages = MovingAverages(model)
        self._assign = tf.function(self._assign_blocks, autograph=False)
        tables = {index: TableSpec.from_json(spec.table) for index, spec in enumerate(specs) if spec.table}
        self._served = serve_tables(model, tables)
        steps: dict[str, Callable[[Any], Any]] = {
            Mode.TRAINING: self._capture.train_step,
            Mode.EVALUATION: model.test_step,
            Mode.PREDICTION: model.predict_step,
        }
        self.lookups = {mode: self._served.lookups(step) for mode, step in steps.items()}
        # Each batch has another number of rows, for which XLA would compile the step again.
        self._compile(jit=bool(getattr(model, "jit_compile", False)) and not tables)

    def _compile(self, jit: bool) -> None:
        self._jit = jit
        steps: tuple[Callable[..., Any], ...] = (
            self._train_step,
            self._served_step(self._test_step),
            self._served_step(self.model.predict_step),
        )
        if getattr(self.model, "run_eagerly", False):
            self._inner_step = self._model_step
            self._train, self._test, self._predict = steps
            return

        # XLA gets the model's own step alone: it can't compile the search for the rows of an embedding.
        self._inner_step = (
            tf.function(self._model_step, autograph=False, reduce_retracing=True, jit_compile=True)
            if jit
            else self._model_step
        )
        self._train = CompiledStep(self._train_step)
        self._test, self._predict = (CompiledStep(step, jit_compile=jit or None) for step in steps[1:])

    def _run(self, name: str, *args: Any) -> Any:
        """Runs a compiled step, without XLA from the first time on that it can't compile one."""
        try:
            return getattr(self, name)(*args)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if not self._jit or not _NOT_COMPILABLE.search(error.message):
                raise
            logger.warning("The model runs without jit_compile, which it can't do: %s", error.message.split("\n")[0])
            self._compile(jit=False)
            return getattr(self, name)(*args)

    def _served_step(self, step: Callable[[Any], Any]) -> Callable[..., Any]:
        """A step on the rows that it is given."""

        def served(batch: Any, rows: Any, positions: Any) -> Any:
            with self._served.serving(rows, positions):
                return step(batch)

        return served

    def train(
        self, batch: Any, blocks: Blocks, version: int = 0, wanted: Wanted | None = None, rows: TableRows | None = None
    ) -> TrainResult:
        """Gradients of `batch`, `(features, labels[, sample_weight])`, at the weights `blocks`.

        Args:
            version: of the weights; the optimizers' `iterations` for a `train_step` that goes by them.
            wanted: what `lookups[Mode.TRAINING]` gave for the batch.
            rows: by embedding table, the rows [n, dim] of the ids in `wanted`.
        """
        self._follow(blocks)
        logs, states, dense, gradients, pairs, new_state, usable, served = self._run(
            "_train",
            batch,
            _to_tensors(blocks),
            tf.constant(not_cached(version), tf.int64),
            *_table_inputs(wanted, rows),
        )
        logs = {name: to_number(value) for name, value in logs.items()}
        decays = self._averages.decays
        state, shares = state_moves(blocks, _to_arrays(new_state), self._specs, self._partition, decays)
        push = Gradients(
            gradients=_to_arrays(gradients),
            dense_variables=tuple(dense),
            rows={index: (array_of(ids), array_of(values)) for index, (ids, values) in pairs.items()}
            | {index: (array_of((wanted or {})[index][0]), array_of(values)) for index, values in served.items()},
            state=state,
            shares=shares,
            loss=float(np.mean(logs["loss"])) if "loss" in logs else 0.0,
            partition=self._partition,
        )
        overflow = ""
        if not _is_finite(push):
            push.non_finite = self._find_non_finite(push)
            if np.isfinite(push.loss):  # else no scale can help
                overflow = self._explain_overflow(usable.numpy())
        return TrainResult(push, logs, _to_numpy(states), overflow)

    def _explain_overflow(self, usable: Any) -> str:
        return ", ".join(
            f"gradients of the scaled loss are not finite; {optimizer.name!r} lowers its scale to {scale.value:g}"
            for optimizer, scale, fits in zip(self._capture.optimizers, self._scales, usable, strict=True)
            if not fits
        )

    def evaluate(
        self, batch: Any, wanted: Wanted | None = None, rows: TableRows | None = None
    ) -> tuple[dict[str, Any], Any]:
        """Adds `batch` to the metrics; returns present logs, and `(labels, predictions, weight)` if a metric
        needs them to travel.

        Args:
            wanted, rows: as in `train`.
        """
        logs, outputs = self._run("_test", batch, *_table_inputs(wanted, rows))
        outputs = tf.nest.map_structure(_as_array, outputs)
        return {name: to_number(value) for name, value in logs.items()}, outputs

    def predict(self, batch: Any, wanted: Wanted | None = None, rows: TableRows | None = None) -> Any:
        """What `predict_step` gives for a batch, which is what Keras would give it: `(features,)`, with labels behind
        them where the data has some. Dense tensors come as NumPy arrays. `wanted` and `rows` as in `train`."""
        return tf.nest.map_structure(_as_array, self._run("_predict", batch, *_table_inputs(wanted, rows)))

    def show_tables(self, read: Callable[[int], Iterable[tuple[Array, Array]]], folder: str) -> None:
        """Makes the model a native one that holds all rows of its tables; it takes no further batch.

        Args:
            read: gives (ids [n], rows [n, dim]) of a table, by its index, in pieces.
            folder: with room for the rows.
        """
        self._served.release()
        for index, spec in enumerate(self._specs):
            if spec.table:
                table = TableSpec.from_json(spec.table)
                complete = table.input_dim or 0 if not table.initializer else 0
                install(self.model, index, *collect(read(index), folder, complete))

    def assign(self, blocks: Blocks) -> None:
        """Sets the model's weights."""
        self._follow(blocks)
        self._assign(_to_tensors(blocks))

    def _follow(self, blocks: Blocks) -> None:
        """Takes blocks by the servers that they are of; steps are compiled anew when these are others."""
        if isinstance(blocks, PlacedBlocks) and blocks.partition is not self._partition:
            if len(blocks.partition) != len(self._partition):
                count = len(blocks.partition)
                self._clipped = clippings(self.model, self._specs, self._capture.optimizers, count)
            self._partition = blocks.partition
            self._assign = tf.function(self._assign_blocks, autograph=False)
            self._compile(self._jit)

    def _model_step(self, batch: Any, rows: Any, positions: Any) -> tuple[Any, dict[int, Any], Any]:
        """The model's own step: its logs, gradients of the plain loss by variable, by optimizer whether to use them."""
        pairs = zip(self.model.weights, self._specs, strict=True)
        with (
            self._served.serving(rows, positions),
            self._averages.counted(),
            refused_assignments([variable for variable, spec in pairs if spec.trainable]),
        ):
            logs, updates = self._capture.train_step(batch)
        gradients: dict[int, Any] = {}
        usable = []
        for number, scale in enumerate(self._scales):
            own = {index: update.gradient for index, update in updates.items() if update.optimizer == number}
            unscaled, fits = scale.unscale(own) if own else ({}, tf.constant(True))
            gradients |= unscaled
            usable.append(fits)
        return logs, gradients, tf.stack(usable)

    def _train_step(self, batch: Any, blocks: Any, version: Any, rows: Any, positions: Any) -> Any:
        self._assign_blocks(blocks)
        for optimizer in self._capture.optimizers:
            unwrapped(optimizer)._iterations.assign(version)
        self._metrics.reset()
        logs, found, usable = self._inner_step(batch, rows, positions)
        states = self._metrics.state_tensors(outputs_too=True)
        self._check_updated(found)
        dense, pairs, served = sort_gradients(found, self._specs, self._clipped, rows)
        gradients = [self._pack(server, dense) for server in self._partition]
        state = [self._pack_state(slices) for slices in self._partition]
        gradients, pairs, served = tf.nest.map_structure(self._rounded, (gradients, pairs, served))
        # Keys, because a function compiled for another kind of batch may have other variables.
        return logs, states, dict.fromkeys(dense, ()), gradients, pairs, state, usable, served

    def _rounded(self, gradient: Any) -> Any:
        return tf.cast(gradient, tf.bfloat16) if self._rounds and gradient.dtype == tf.float32 else gradient

    def _check_updated(self, found: Mapping[int, Any]) -> None:
        unexpected = [self._specs[index].path for index in found if not self._specs[index].trainable]
        if unexpected:
            raise ModelFileError(
                f"The model's train_step gives an optimizer gradients of {', '.join(map(repr, unexpected))} now, which "
                "it did not when the job started. Which variables a step updates must be the same for every batch."
            )

    def _test_step(self, batch: Any) -> Any:
        outputs: Any = ()
        if MetricTransport.OUTPUTS in self._metrics.transports().values():
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

    def _assign_blocks(self, blocks: Any) -> None:
        parts: dict[int, list[tuple[int, Any]]] = {}
        for server, slices in enumerate(self._partition):
            for kind, trainable in ((WEIGHTS, True), (STATE, False)):
                flat = of_kind(kind, blocks[server])
                for part, dtype, offset in layout(self._specs, slices, trainable):
                    piece = flat[dtype][offset : offset + part.elements]
                    parts.setdefault(part.variable, []).append((part.start, piece))
        for index, found in parts.items():
            pieces = [piece for _, piece in sorted(found, key=lambda item: item[0])]
            whole = pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
            self.model.weights[index].assign(tf.reshape(whole, self._specs[index].shape))

    def _pack(self, slices: Sequence[Slice], gradients: Mapping[int, Any]) -> dict[str, Any]:
        pieces: dict[str, list[Any]] = {}
        for part, dtype, _ in layout(self._specs, slices, True, gradients.keys()):
            flat = tf.reshape(gradients[part.variable], [-1])
            pieces.setdefault(dtype, []).append(flat[part.start : part.stop])
        return {dtype: tf.concat(flat, 0) if len(flat) > 1 else flat[0] for dtype, flat in pieces.items()}

    def _pack_state(self, slices: Sequence[Slice]) -> dict[str, Any]:
        """The non-trainable variables after the step."""
        pieces: dict[str, list[Any]] = {}
        for part, dtype, _ in layout(self._specs, slices, False):
            new = tf.reshape(self.model.weights[part.variable].value, [-1])[part.start : part.stop]
            pieces.setdefault(dtype, []).append(new)
        return {dtype: tf.concat(flat, 0) if len(flat) > 1 else flat[0] for dtype, flat in pieces.items()}

    def _find_non_finite(self, push: Gradients) -> str:
        if not np.isfinite(push.loss):
            return "the loss"
        for index, (_, values) in push.rows.items():
            if not np.isfinite(values.astype(np.float64)).all():
                return f"the gradient of {self._specs[index].path!r}"
        for server, slices in enumerate(self._partition):
            gradients, state = push.gradients[server], push.state[server]
            for part, dtype, offset in layout(self._specs, slices, True, push.dense_variables):
                if not np.isfinite(gradients[dtype][offset : offset + part.elements].astype(np.float64)).all():
                    return f"the gradient of {self._specs[part.variable].path!r}"
            for part, dtype, offset in layout(self._specs, slices, False):
                here = slice(offset, offset + part.elements)
                if (
                    dtype in state
                    and not np.isfinite(state[dtype][here][push.shares[server][dtype][here] > 0].astype(float)).all()
                ):
                    return f"the new value of {self._specs[part.variable].path!r}"
        return ""


def _is_finite(push: Gradients) -> bool:
    arrays = [flat for server in push.gradients for flat in server.values()]
    arrays += [
        flat[shares[dtype] > 0]
        for server, shares in zip(push.state, push.shares, strict=True)
        for dtype, flat in server.items()
    ]
    arrays += [values for _, values in push.rows.values()]
    return bool(np.isfinite(push.loss)) and all(map(all_finite, arrays))


def _table_inputs(wanted: Wanted | None, rows: TableRows | None) -> tuple[dict[int, Any], dict[int, Any]]:
    """Rows and positions, as inputs of a compiled step."""
    return (
        {index: tensor_of(values) for index, values in (rows or {}).items()},
        {index: positions for index, (_, positions) in (wanted or {}).items()},
    )


def _to_tensors(blocks: Blocks) -> Any:
    return [{name: tensor_of(block) for name, block in server.items()} for server in blocks]


def _to_arrays(servers: Any) -> Any:
    return [{name: array_of(tensor) for name, tensor in server.items()} for server in servers]


def _to_numpy(structure: Any) -> Any:
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), structure)


def _as_array(tensor: Any) -> Any:
    composite = isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor))
    return tensor.numpy() if hasattr(tensor, "numpy") and not composite else tensor
