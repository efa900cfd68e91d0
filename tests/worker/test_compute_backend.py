"""The worker on a backend of a few lines, in NumPy: it asks for what `elasticcb/compute/backend.py` says alone."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb.compute import registry
from elasticcb.compute.backend import Backend, Computation, HeldModel, Prepared, StepResult
from elasticcb.optimizers.state import OptimizerState
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, unpack_weights
from elasticcb.sharding.table_spec import TableSpec

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


RATE, MOMENTUM = 0.05, 0.9


class LinearRegression(Computation):
    """Of one Dense layer, compiled with SGD and "mse"."""

    decays: Mapping[int, float] = {}

    def __init__(self, held: HeldModel) -> None:
        self._loss = held.metrics.units()["loss"]
        self._specs = held.specs
        self._weights = [variable.numpy() for variable in held.model.weights]
        self._slots = [np.zeros(spec.shape, "float32") for spec in held.specs]
        self._steps = np.int32(0)

    def prepare(self, data: Any, mode: Mode, fixed: Any = ()) -> Prepared:
        parts = keras.utils.unpack_x_y_sample_weight(data)
        arrays = tuple(np.asarray(part) for part in parts if part is not None)
        return Prepared(arrays, len(arrays[0]))

    def weights(self) -> list[Array]:
        return self._weights

    def set_weights(self, weights: PlacedBlocks) -> None:
        self._weights = [np.array(each) for each in unpack_weights(weights, self._specs, weights.partition)]

    def optimizer_state(self) -> OptimizerState:
        slots = {(index, "momentums"): slot.copy() for index, slot in enumerate(self._slots)}
        return OptimizerState(slots, shared=self.shared_optimizer_state(), optimizers=("SGD",))

    def shared_optimizer_state(self) -> dict[str, Array]:
        return {"iterations": np.asarray(self._steps), "learning_rate": np.float32(RATE)}

    def set_optimizer_state(self, state: OptimizerState) -> None:
        for (index, _), slot in state.slots.items():
            self._slots[index] = np.array(slot)
        self._steps = np.int32(state.shared.get("iterations", self._steps))

    def train(self, batch: Prepared, rows: Mapping[int, Array]) -> StepResult:
        error, loss = self._error(batch)
        slope = 2 * error / error.size
        for index, gradient in enumerate([batch.data[0].T @ slope, slope.sum(0)]):
            self._slots[index] = MOMENTUM * self._slots[index] - RATE * gradient
            self._weights[index] = self._weights[index] + self._slots[index]
        self._steps += 1
        states = {"loss": [np.float32(loss * batch.records), np.float32(batch.records)]}
        return StepResult(logs={"loss": loss}, states=states, rows={})

    def evaluate(self, batch: Prepared, rows: Mapping[int, Array]) -> tuple[dict[str, Any], Any]:
        _, loss = self._error(batch)
        self._loss.update_state(loss, sample_weight=batch.records)
        return {"loss": float(self._loss.result())}, ()

    def predict(self, batch: Prepared, rows: Mapping[int, Array]) -> Any:
        return batch.data[0] @ self._weights[0] + self._weights[1]

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

    def computation(self, held: HeldModel) -> Computation:
        return LinearRegression(held)


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
        model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse")
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
