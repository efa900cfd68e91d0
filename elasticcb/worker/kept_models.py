"""The model of a job and its compiled steps, for a later job with the same program: a small call would take longer to
compile its step than to run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from elasticcb.compute.backend import Computation
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.spec import Spec
from elasticcb.optimizers.traits import model_optimizers, sets_final_weights, unwrapped
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.settings import Command, JobSettings
from elasticcb.sharding.partition import VariableSpec

_MOST_BYTES = 64 * 2**20  # of weights: a large model is worth its memory, and its steps take longer than compiling them


@dataclass
class KeptModel:
    """A model on a worker.

    Attributes:
        specs: its weights on the servers.
        initial: values of the optimizers' variables before the first step.
    """

    spec: Spec
    settings: JobSettings
    model: keras.Model
    metrics: ModelMetrics
    computation: Computation
    specs: Sequence[VariableSpec]
    initial: list[tuple[keras.Variable, Array]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.is_usable:
            own = [unwrapped(optimizer) for optimizer in model_optimizers(self.model)]
            self.initial = [(variable, variable.numpy()) for optimizer in own for variable in optimizer.variables]

    @property
    def is_usable(self) -> bool:
        """Whether the program says that only variables of the model change, the servers hold no tables, and no
        optimizer begins with a copy of the weights."""
        size = sum(math.prod(spec.shape) * dtype_of(spec.dtype).itemsize for spec in self.specs)
        has_tables = any(spec.table for spec in self.specs)
        copies = any(map(sets_final_weights, model_optimizers(self.model)))
        is_steady = self.spec.is_steady and not self.model.run_eagerly and not copies
        return is_steady and not has_tables and size <= _MOST_BYTES

    def fits(self, settings: JobSettings) -> bool:
        """Whether a job with these settings can use it."""
        return _relevant(settings) == _relevant(self.settings)

    def restore(self) -> None:
        """Sets the variables of the optimizers to their initial values; the program has those of all others."""
        for variable, value in self.initial:
            variable.assign(value)


class KeptModels:
    """One model for each command, while a cluster runs."""

    def __init__(self) -> None:
        self._models: dict[Command, KeptModel] = {}

    def take(self, settings: JobSettings) -> KeptModel | None:
        """The model of the last job with this command, if another job with these settings can use it."""
        model = self._models.pop(settings.command, None)
        return model if model is not None and model.fits(settings) else None

    def add(self, model: KeptModel | None) -> None:
        if model is not None:
            self._models[model.settings.command] = model


def _relevant(settings: JobSettings) -> Any:
    """What a compiled step may depend on."""
    training = replace(settings.training, num_epochs=1, initial_epoch=0, validation_freq=1)
    return settings.command, training, settings.embedding, settings.keras_backend
