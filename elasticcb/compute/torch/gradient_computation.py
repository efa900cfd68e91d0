"""Training steps whose gradients go to servers."""

from __future__ import annotations

from collections.abc import Sequence

from elasticcb.compute.backend import GradientComputation, GradientResult, HeldModel, Prepared, TableRows
from elasticcb.compute.capture import check_updated
from elasticcb.compute.clipping import Clipping, clippings
from elasticcb.compute.loss_scale import explain_overflow, unscaled
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.torch.arrays import array_of
from elasticcb.compute.torch.capture import TorchCapture, refused_assignments
from elasticcb.compute.torch.computation import TorchComputation, numbers
from elasticcb.compute.torch.gradients import sort_gradients
from elasticcb.compute.torch.loss_scale import TorchScale
from elasticcb.keras_private import updates_of
from elasticcb.optimizers.traits import unwrapped
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import pack


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
