"""The worker on a backend of a few lines, in NumPy: it asks for what `elasticcb/compute/backend.py` says alone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb.compute import registry
from elasticcb.compute.backend import (
    Backend,
    Exchange,
    GradientComputation,
    GradientResult,
    HeldModel,
    LocalComputation,
    PlacedComputation,
    Prepared,
)
from elasticcb.model.metrics import ModelMetrics
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, unpack_weights
from elasticcb.sharding.partition import VariableSpec, pack
from elasticcb.sharding.table_spec import TableSpec

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class LinearRegression(GradientComputation):
    """Of one Dense layer, compiled with "mse"."""

    def __init__(self, metrics: ModelMetrics, specs: Sequence[VariableSpec]) -> None:
        self._loss = metrics.units()["loss"]
        self._specs = specs
        self._kernel, self._bias = np.zeros(0), np.zeros(0)

    def prepare(self, data: Any, mode: Mode, fixed: Any = ()) -> Prepared:
        parts = keras.utils.unpack_x_y_sample_weight(data)
        arrays = tuple(np.asarray(part) for part in parts if part is not None)
        return Prepared(arrays, len(arrays[0]))

    def set_weights(self, weights: PlacedBlocks) -> None:
        self._kernel, self._bias = unpack_weights(weights, self._specs, weights.partition)

    def train(self, batch: Prepared, weights: PlacedBlocks, version: int, rows: Mapping[int, Array]) -> GradientResult:
        self.set_weights(weights)
        error, loss = self._error(batch)
        slope = 2 * error / error.size
        gradients = [batch.data[0].T @ slope, slope.sum(0)]
        return GradientResult(
            logs={"loss": loss},
            states={"loss": [np.float32(loss * batch.records), np.float32(batch.records)]},
            gradients=[pack(gradients, self._specs, slices, trainable=True) for slices in weights.partition],
            dense_variables=(0, 1),
            rows={},
            state=[{} for _ in weights.partition],
            decays={},
        )

    def evaluate(self, batch: Prepared, rows: Mapping[int, Array]) -> tuple[dict[str, Any], Any]:
        _, loss = self._error(batch)
        self._loss.update_state(loss, sample_weight=batch.records)
        return {"loss": float(self._loss.result())}, ()

    def predict(self, batch: Prepared, rows: Mapping[int, Array]) -> Any:
        return batch.data[0] @ self._kernel + self._bias

    def hold_tables(self, tables: Iterable[tuple[int, Array, Array]]) -> None:
        assert not list(tables)

    def _error(self, batch: Prepared) -> tuple[Array, float]:
        error = self.predict(batch, {}) - batch.data[1]
        return error, float(np.mean(error**2))


class NumPyBackend(Backend):
    def build(self, *args: Any) -> None:
        pass  # it has an Input

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        return model.predict_on_batch(keras.utils.unpack_x_y_sample_weight(batch)[0])

    def find_tables(self, *args: Any) -> dict[int, TableSpec]:
        return {}

    def computation(self, held: HeldModel) -> GradientComputation:
        return LinearRegression(held.metrics, held.specs)

    def local_computation(self, held: HeldModel) -> LocalComputation:
        raise NotImplementedError

    def placed(
        self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange
    ) -> PlacedComputation:
        raise NotImplementedError


@pytest.fixture
def in_numpy(monkeypatch):
    """Workers compute in NumPy from here on when it is called."""

    def replace():
        monkeypatch.setitem(registry.BACKENDS, keras.backend.backend(), (__name__, "NumPyBackend"))
        registry.backend.cache_clear()

    yield replace
    monkeypatch.undo()
    registry.backend.cache_clear()


def test_a_job_on_another_backend_comes_to_the_same(in_numpy):
    def results():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        history = cluster.fit(model, X, Y, batch_size=16, epochs=3, validation_data=(X, -Y), verbose=0, shuffle=False)
        loss, predicted = cluster.evaluate(model, X, Y, verbose=0), cluster.predict(model, X, verbose=0)
        return history.history, model.get_weights(), loss, predicted

    with elasticcb.Cluster(1, 2, kind="inprocess", updates="sync", log_level="ERROR") as cluster:
        expected = results()
        in_numpy()
        assert isinstance(registry.backend(), NumPyBackend)
        keras.tree.map_structure(lambda one, other: np.testing.assert_allclose(one, other, 1e-4), results(), expected)


def test_framework_that_no_backend_is_for_is_told(monkeypatch):
    monkeypatch.setattr(registry, "BACKENDS", {})
    with pytest.raises(elasticcb.errors.UsageError, match="Keras runs on 'tensorflow' here"):
        registry.backend.__wrapped__()
