"""The PyTorch backend."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import torch

from elasticcb.compute.backend import (
    Applied,
    Backend,
    Exchange,
    GradientComputation,
    GradientResult,
    HeldModel,
    Prepared,
    StepResult,
    TableRows,
)
from elasticcb.compute.capture import check_updated
from elasticcb.compute.clipping import Clipping, clippings
from elasticcb.compute.dense_batches import arrays_of, repeated
from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.local_optimizers import HoldsOptimizers, copied, prepared
from elasticcb.compute.loss_scale import explain_overflow, unscaled
from elasticcb.compute.movable import Allowed, movable
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.placed import PlacedOptimizers
from elasticcb.compute.priming import kept, prime_training
from elasticcb.compute.torch.arrays import array_of, as_array, tensors_of
from elasticcb.compute.torch.capture import TorchCapture, refused_assignments, step_variables
from elasticcb.compute.torch.computation import TorchComputation, numbers
from elasticcb.compute.torch.gradients import sort_gradients
from elasticcb.compute.torch.lookups import problems_of
from elasticcb.compute.torch.loss_scale import TorchScale
from elasticcb.keras_private import compute_output_spec, layers_of, updates_of
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.traits import unwrapped
from elasticcb.optimizers.variables import StepVariables
from elasticcb.process.devices import THREADS_VARIABLE
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import Slice, VariableSpec, pack
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.devices import leave_gpus


class TorchGradients(TorchComputation, GradientComputation):
    """For the arguments, see `Backend.computation`."""

    def __init__(self, held: HeldModel) -> None:
        super().__init__(held, TorchCapture(held.model))
        self._clipped: Sequence[Clipping] = ()
        self._servers = 0
        self._clip_for(len(held.partition))
        self._scales = [TorchScale(optimizer) for optimizer in self._capture.optimizers]
        self._averages = MovingAverages(held.model)
        pairs = zip(held.model.weights, held.specs, strict=True)
        self._trainable = [variable for variable, spec in pairs if spec.trainable and not spec.table]

    def _clip_for(self, servers: int) -> None:
        self._servers = servers
        self._clipped = clippings(self._model, self._specs, self._capture.optimizers, servers)

    def train(self, batch: Prepared, weights: PlacedBlocks, version: int, rows: TableRows) -> GradientResult:
        if len(weights.partition) != self._servers:
            self._clip_for(len(weights.partition))
        self.set_weights(weights)
        for optimizer in self._capture.optimizers:
            updates_of(unwrapped(optimizer)).assign(version)
        self._metrics.reset()
        with (
            self._step_of(batch, rows, training=True),
            self._averages.counted(),
            refused_assignments(self._trainable),
            self._metrics.kept_outputs(Mode.TRAINING) as outputs,
        ):
            logs, updates = self._capture.train_step(batch.data)
        check_updated(updates, self._specs)
        found, usable = unscaled(self._scales, updates)
        dense, pairs = sort_gradients(found, self._specs, self._clipped, batch.ids)
        weights_and_specs = enumerate(zip(self._model.weights, self._specs, strict=True))
        state = {index: array_of(each.value) for index, (each, spec) in weights_and_specs if not spec.trainable}
        return GradientResult(
            logs=numbers(logs),
            states=self._states(outputs),
            gradients=[pack(dense, self._specs, slices, True, dense) for slices in weights.partition],
            dense_variables=tuple(dense),
            rows=pairs,
            state=[pack(state, self._specs, slices, False) for slices in weights.partition],
            decays=self._averages.decays,
            overflow=explain_overflow(zip(self._scales, usable, strict=True)),
        )


class TorchLocal(TorchComputation, HoldsOptimizers):
    """For the arguments, see `Backend.local_computation`."""

    def __init__(self, held: HeldModel) -> None:
        capture = TorchCapture(held.model, held.tables, refuses=False)
        HoldsOptimizers.__init__(self, prepared(held, capture.optimizers))
        TorchComputation.__init__(self, held, capture)
        self._averages = MovingAverages(held.model)
        # Returned by a step, because a push of its row gradients needs it.
        self._shared: Mapping[str, Any] = self._held.shared if held.tables else {}

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        shared = copied(self._shared)
        self._metrics.reset()
        keeps = self._metrics.kept_outputs(Mode.TRAINING)
        with self._step_of(batch, rows, training=True), self._averages.counted(), keeps as outputs:
            logs, updates = self._capture.train_step(batch.data)
        found = {index: update.gradient for index, update in updates.items() if index in batch.ids}
        _, pairs = sort_gradients(found, self._specs, (), batch.ids)
        return StepResult(logs=numbers(logs), states=self._states(outputs), rows=pairs, shared=shared)

    def weights(self, partition: Sequence[Sequence[Slice]]) -> PlacedBlocks:
        arrays = [array_of(variable.value) for variable in self._model.weights]
        return PlacedBlocks((pack_weights(arrays, self._specs, slices) for slices in partition), partition)


class TorchPlaced(PlacedOptimizers):
    """For the arguments, see `Backend.placed`."""

    def __init__(self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange) -> None:
        super().__init__(model, specs, num_ps, exchange, TorchScale)

    def set_weights(self, weights: Sequence[Array]) -> None:
        for variable, value in zip(self._model.weights, weights, strict=True):
            variable.assign(value)

    def _update(self, gradients: dict[int, Any], usable: bool) -> None:
        dense, rows = sort_gradients(gradients, self._specs, self._clipped)
        state = {
            index: as_array(variable.value)
            for index, (variable, spec) in enumerate(zip(self._model.weights, self._specs, strict=True))
            if not spec.trainable
        }
        self.set_weights(self._exchange(Applied(dense, rows, state, usable)))


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool = False) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    with told_with_batch(spec, batch, mode), building:
        _make_variables(model, tensors_of(batch))
        size = fixed_batch_size(model)
        tensors = tensors_of(batch if size is None else repeated(arrays_of(batch), size))
        if mode is Mode.TRAINING:
            return prime_training(model, tensors, local, _run_unchanged, step_variables)
        _run_unchanged(model, model.test_step if mode is Mode.EVALUATION else model.predict_step, tensors)
    return None


def _make_variables(model: keras.Model, batch: Any) -> None:
    """Builds lazily created variables without running the step. Errors are ignored: they recur when it runs."""
    if not all(layer.built for layer in layers_of(model)):
        with contextlib.suppress(Exception):
            compute_output_spec(model, keras.utils.unpack_x_y_sample_weight(batch)[0])


def _run_unchanged(model: keras.Model, step: Callable[[Any], Any], batch: Any) -> None:
    """Runs a step and restores the model, including changes by layers in `call` and the seeds that they use."""
    model.eval()
    with kept(model), torch.no_grad():
        step(batch)


OWN_THREADS = "OMP_NUM_THREADS"  # read by PyTorch itself


class TorchBackend(Backend):
    """Keras on PyTorch."""

    build = staticmethod(build)
    computation = TorchGradients
    local_computation = TorchLocal
    placed = TorchPlaced

    forks_with_gpus = False

    def __init__(self) -> None:
        leave_gpus()
        # Otherwise PyTorch starts a thread for each core, in each of several workers on one machine.
        if OWN_THREADS not in os.environ and THREADS_VARIABLE in os.environ:
            torch.set_num_threads(int(os.environ[THREADS_VARIABLE]))

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        model.eval()
        with torch.no_grad():
            return keras.tree.map_structure(as_array, model.predict_step(tensors_of(batch)))

    def data(self, model: keras.Model, batch: Any) -> Any:
        return tensors_of(batch)

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        allowed: Allowed,
        local: bool = False,
        validation: Callable[[], Any] | None = None,
    ) -> dict[int, TableSpec]:
        step = {Mode.TRAINING: model.train_step, Mode.EVALUATION: model.test_step}.get(mode, model.predict_step)
        problems = functools.partial(problems_of, model)
        passes = None if validation is None else (lambda: (model.test_step, tensors_of(validation())))
        return movable(model, step, tensors_of(batch), allowed, problems, passes)
