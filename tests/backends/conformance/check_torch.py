"""What only the backend of PyTorch has to see to: steps that PyTorch runs as they are written."""

import keras
import numpy as np
import pytest

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
