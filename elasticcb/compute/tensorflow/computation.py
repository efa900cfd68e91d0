"""One compiled function per kind of batch, around the model's own `train_step` and friends."""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from elasticcb.compute.backend import Computation, HeldModel, Prepared, TableRows
from elasticcb.compute.capture import OptimizerCapture
from elasticcb.compute.tensorflow.lookups import TensorFlowTables
from elasticcb.model.input_pipeline import records_in
from elasticcb.model.metric_messages import States, with_outputs
from elasticcb.model.metrics import to_number
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import Blocks, PlacedBlocks, cut_by_dtype, pieces_of
from elasticcb.sharding.partition import Slice
from elasticcb.tf.batch_signatures import Fixed
from elasticcb.tf.compiled_step import CompiledStep
from elasticcb.tf.concrete_call import CompiledLater
from elasticcb.tf.convert import array_of, tensor_of

logger = logging.getLogger(__name__)

_NOT_COMPILABLE = re.compile(r"XLA|unsupported operations|compile-time constant|uncompilable", re.IGNORECASE)


@dataclass(frozen=True)
class _Steps:
    """Functions of tensors."""

    jit: bool
    model_step: Callable[..., Any]
    train: Callable[..., Any]
    test: Callable[..., Any]
    predict: Callable[..., Any]


class TensorFlowComputation(Computation):
    """Runs batches of one model."""

    def __init__(self, held: HeldModel, capture: OptimizerCapture) -> None:
        self._model, self._metrics, self._specs, self._partition = held
        self._capture = capture
        self._assign: Callable[[Any], Any] | None = None
        self._served = TensorFlowTables(held.model, held.tables)
        steps: dict[str, Callable[[Any], Any]] = {
            Mode.TRAINING: self._capture.train_step,
            Mode.EVALUATION: held.model.test_step,
            Mode.PREDICTION: held.model.predict_step,
        }
        self._fixed: dict[str, Fixed] = {}  # by mode, as in `CompiledStep`
        self._lookups = {mode: self._served.lookups(step, self._fixed_in(mode)) for mode, step in steps.items()}
        # The number of rows differs for each batch, and XLA would compile the step again.
        self._steps = self._compiled(jit=bool(getattr(held.model, "jit_compile", False)) and not held.tables)

    def _compiled(self, jit: bool) -> _Steps:
        test, predict = self._served_step(self._test_step), self._served_step(self._model.predict_step)
        if getattr(self._model, "run_eagerly", False):
            return _Steps(jit, self._model_step, self._train_step, test, predict)
        # XLA compiles only the model's own step: it can't compile the row lookup of an embedding.
        model_step = (
            tf.function(self._model_step, autograph=False, reduce_retracing=True, jit_compile=True)
            if jit
            else self._model_step
        )
        return _Steps(
            jit,
            model_step,
            CompiledStep(self._train_step, fixed=self._fixed_in(Mode.TRAINING)),
            CompiledStep(test, jit or None, self._fixed_in(Mode.EVALUATION)),
            CompiledStep(predict, jit or None, self._fixed_in(Mode.PREDICTION)),
        )

    def _fixed_in(self, mode: str) -> Callable[[], Fixed]:
        return lambda: self._fixed.get(mode, ())

    def _run(self, name: str, *args: Any) -> Any:
        """Runs a compiled step; stops using XLA the first time that it can't compile a step."""
        try:
            return getattr(self._steps, name)(*args)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if not self._steps.jit or not _NOT_COMPILABLE.search(error.message):
                raise
            logger.warning(
                "The model runs without jit_compile, because XLA can't compile it: %s", error.message.split("\n")[0]
            )
            self._steps = self._compiled(jit=False)
            return getattr(self._steps, name)(*args)

    def _served_step(self, step: Callable[[Any], Any]) -> Callable[..., Any]:
        """A step on the given rows."""

        def served(batch: Any, rows: Any, places: Any) -> Any:
            with self._served.serving(rows, places):
                return step(batch)

        return served

    def prepare(self, data: Any, mode: Mode, fixed: Fixed = ()) -> Prepared:
        # Keras traces `predict_step` for the first batch, and with a free size only when a batch of another size comes.
        self._fixed[mode] = [True] * len(tf.nest.flatten(data)) if mode is Mode.PREDICTION else fixed
        wanted = self._lookups[mode](data)
        ids = {table: array_of(found) for table, (found, _) in wanted.items()}
        return Prepared(data, records_in(data), ids, {table: places for table, (_, places) in wanted.items()})

    def evaluate(self, batch: Prepared, rows: TableRows) -> tuple[dict[str, Any], Any]:
        logs, outputs = self._run("test", batch.data, table_tensors(rows), batch.places)
        return {name: to_number(value) for name, value in logs.items()}, tf.nest.map_structure(_as_array, outputs)

    @staticmethod
    def _states(tensors: Mapping[str, Sequence[Any]], outputs: Any) -> States:
        """The states after a training step."""
        states = {name: [tensor.numpy() for tensor in own] for name, own in tensors.items()}
        return with_outputs(states, tf.nest.map_structure(_as_array, outputs))

    def predict(self, batch: Prepared, rows: TableRows) -> Any:
        return tf.nest.map_structure(_as_array, self._run("predict", batch.data, table_tensors(rows), batch.places))

    def set_weights(self, weights: PlacedBlocks) -> None:
        self._follow(weights.partition)
        names = [sorted(server) for server in weights]
        tensors = [tensor_of(server[name]) for server, own in zip(weights, names, strict=True) for name in own]
        if self._assign is None:

            def assign(*flat: Any) -> None:
                given = iter(flat)
                self._assign_blocks([{name: next(given) for name in own} for own in names])

            self._assign = CompiledLater(assign, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
        self._assign(tensors)

    @abstractmethod
    def _train_step(self, batch: Any, *args: Any) -> Any:
        """The function behind `train`, on tensors."""

    @abstractmethod
    def _model_step(self, batch: Any, rows: Any, places: Any) -> Any:
        """The part of it that XLA may compile."""

    def _follow(self, partition: Sequence[Sequence[Slice]]) -> bool:
        """Switches to the servers of the weights; returns whether these are different."""
        if partition == self._partition:
            return False
        self._partition = partition
        self._assign = None
        return True

    def _test_step(self, batch: Any) -> Any:
        with self._metrics.kept_outputs(Mode.EVALUATION) as outputs:
            return self._model.test_step(batch), tuple(outputs)

    def _metric_states(self) -> dict[str, list[Any]]:
        """The current states of all metrics, as tensors."""
        units = self._metrics.units().items()
        return {name: [tf.convert_to_tensor(variable.value) for variable in unit.variables] for name, unit in units}

    def _assign_blocks(self, blocks: Any) -> None:
        for index, pieces in pieces_of(blocks, self._specs, self._partition).items():
            whole = pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
            self._model.weights[index].assign(tf.reshape(whole, self._specs[index].shape))

    def _values(self, trainable: bool) -> dict[int, Any]:
        """Of the model's variables, by index."""
        weights = enumerate(self._model.weights)
        return {index: each.value for index, each in weights if self._specs[index].trainable is trainable}

    def _pack(self, values: Mapping[int, Any], trainable: bool) -> list[dict[str, Any]]:
        """Flat blocks by server, like those of `sharding.partition.pack` for arrays."""
        flat = {index: tf.reshape(value, [-1]) for index, value in values.items()}
        cut = [cut_by_dtype(flat, self._specs, slices, trainable) for slices in self._partition]
        return [{dtype: tf.concat(own, 0) if len(own) > 1 else own[0] for dtype, own in each.items()} for each in cut]


def table_tensors(rows: TableRows) -> dict[int, Any]:
    return {index: tensor_of(values) for index, values in rows.items()}


def to_tensors(blocks: Blocks) -> Any:
    return [{name: tensor_of(block) for name, block in server.items()} for server in blocks]


def to_arrays(servers: Any) -> Any:
    return [{name: array_of(tensor) for name, tensor in server.items()} for server in servers]


def _as_array(tensor: Any) -> Any:
    composite = isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor))
    return tensor.numpy() if hasattr(tensor, "numpy") and not composite else tensor
