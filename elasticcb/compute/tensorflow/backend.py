"""TensorFlow as a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from elasticcb.compute.backend import Backend, Computation, Exchange, PlacedComputation
from elasticcb.compute.tensorflow.computation import TensorFlowComputation
from elasticcb.compute.tensorflow.placed import TensorFlowPlaced
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.spec import Spec
from elasticcb.model.weights import prime
from elasticcb.settings import Mode, WireDtype
from elasticcb.sharding.partition import Slice, VariableSpec


class TensorFlowBackend(Backend):
    """Keras on TensorFlow."""

    def build(self, spec: Spec, model: keras.Model, batch: Any, mode: Mode) -> None:
        prime(spec, model, batch, mode)

    def computation(
        self,
        model: keras.Model,
        metrics: ModelMetrics,
        specs: Sequence[VariableSpec],
        partition: Sequence[Sequence[Slice]],
        wire_dtype: WireDtype,
    ) -> Computation:
        return TensorFlowComputation(model, metrics, specs, partition, wire_dtype)

    def placed(
        self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange
    ) -> PlacedComputation:
        return TensorFlowPlaced(model, specs, num_ps, exchange)
