"""What only the backend of PyTorch has to see to: steps that PyTorch runs as they are written."""

import keras
import numpy as np
import pytest

import elasticcb
from check_steps import assert_same, hold, tensors
from check_tables import DIM, IDS, hold_tables, with_native_tables
from compiled_models import BATCH, Y
from elasticcb.compute.registry import backend
from elasticcb.layers import Embedding
from elasticcb.layers.table_layers import NotServableError
from elasticcb.settings import Mode

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="of PyTorch")


def test_gradients_of_rows_of_a_scaled_loss_are_those_of_the_plain_one():
    def pushed(optimizer):
        model = with_native_tables()
        model.compile(optimizer, "mse")
        batch = tensors((IDS[:BATCH], Y[:BATCH]))
        held, tables = hold_tables(model, batch)
        computation = backend().computation(held)
        prepared = computation.prepare(batch, Mode.TRAINING)
        return computation.train(prepared, {index: tables[index][ids] for index, ids in prepared.ids.items()}).rows

    expected = pushed(keras.optimizers.Adam(0.01))
    assert_same(pushed(keras.optimizers.Adam(0.01, loss_scale_factor=64.0)), expected)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=1024.0)
    assert_same(pushed(scaled), expected)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def test_a_module_in_a_layer_is_trained_and_its_buffers_come_back():
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    ends = []
    with elasticcb.Cluster(log_level="ERROR") as cluster:
        for fit in (keras.Model.fit, cluster.fit):
            keras.utils.set_random_seed(1)
            layer = keras.layers.TorchModuleWrapper(Module(), output_shape=(None, 2))
            model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            for _ in range(2):
                fit(model, x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
            ends.append([*model.get_weights(), *(each.numpy().copy() for each in layer.module.buffers())])
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_to_look_for_ids_changes_nothing():
    model = with_native_tables()
    first, second = tensors((IDS[:BATCH], Y[:BATCH])), tensors((IDS[BATCH:], Y[BATCH:]))
    held, _ = hold_tables(model, first)
    computation = backend().computation(held)
    before, drawn = [np.array(each.numpy()) for each in model.weights], torch.random.get_rng_state()
    for batch in (first, second):
        computation.prepare(batch, Mode.TRAINING)
    assert_same([each.numpy() for each in model.weights], before)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(each.value.grad is None for each in model.weights)
    assert model.optimizer.iterations.numpy() == 0


@pytest.mark.parametrize("why", ["random numbers", "the weights"])
def test_ids_that_depend_on_what_changes_are_refused(why):
    ids = keras.Input((3,), dtype="int64")
    if why == "random numbers":
        chosen = keras.layers.Lambda(lambda x: keras.random.randint(keras.ops.shape(x), 0, 9))(ids)
    else:
        chosen = keras.ops.cast(keras.layers.Dense(3)(keras.ops.cast(ids, "float32")), "int64") % 9
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(Embedding(DIM)(chosen))))
    model.compile("sgd", "mse")
    with pytest.raises(NotServableError, match=f"its ids depend on {why}"):
        hold(model, (IDS[:BATCH], Y[:BATCH]), threshold=0)
