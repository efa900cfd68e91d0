"""What only the backend of PyTorch has to see to: steps that PyTorch runs as they are written."""

import keras
import numpy as np
import pytest

from check_steps import assert_same, hold, tensors
from check_tables import DIM, IDS, hold_tables, with_native_tables
from compiled_models import BATCH, X, Y, batches, dense
from elasticcb.compute.backend import Applied
from elasticcb.compute.registry import backend
from elasticcb.errors import ModelFileError
from elasticcb.layers import Embedding
from elasticcb.layers.table_layers import NotServableError
from elasticcb.model.weights import variable_specs
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import unpack

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="of PyTorch")


def train_once(model, batch, held=None):
    """A step by gradients: its result, and the dense gradients by variable."""
    held = held or hold(model, batch, local=False)
    values = [np.array(variable.numpy()) for variable in model.weights]
    blocks = [pack_weights(values, held.specs, slices) for slices in held.partition]
    computation = backend().computation(held)
    prepared = computation.prepare(tensors(batch), Mode.TRAINING)
    result = computation.train(prepared, PlacedBlocks(blocks, held.partition), 0, {})
    whole = {i: np.zeros(spec.shape, spec.dtype) for i, spec in enumerate(held.specs) if spec.trainable}
    gradients = {index: whole[index] for index in result.dense_variables}
    for flat, slices in zip(result.gradients, held.partition, strict=True):
        if gradients.keys() == whole.keys():
            unpack(flat, held.specs, slices, True, whole)
    return result, gradients


def stepping(after=None, before=None):
    """A model whose own step does something before and after its optimizer is given gradients."""

    class Stepping(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            if before is not None:
                before(self)
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
                if after is not None:
                    after(self)
            return {"loss": loss}

    model = Stepping()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def test_a_step_that_reads_weights_after_their_gradients_were_given_is_refused():
    with pytest.raises(ModelFileError, match=r"reads '.*kernel' after giving"):
        hold(stepping(after=lambda model: keras.ops.sum(model.layer.kernel)), next(batches()), local=False)


def test_a_step_that_assigns_to_weights_that_servers_update_is_refused():
    model = stepping(before=lambda model: model.layer.kernel.assign(model.layer.kernel.value.detach() * 2))
    with pytest.raises(ModelFileError, match=r"assigns a value to '.*kernel'"):
        train_once(model, next(batches()))


def test_gradients_of_a_scaled_loss_are_those_of_the_plain_one_unless_they_overflow():
    batch = next(batches())
    _, expected = train_once(dense(), batch)
    for scaled in (
        keras.optimizers.Adam(0.01, loss_scale_factor=64.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=1024.0),
    ):
        result, found = train_once(dense(scaled), batch)
        assert result.overflow == ""
        assert_same(found, expected)
    huge = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**127)
    result, _ = train_once(dense(huge), (X[:BATCH] * 1e6, Y[:BATCH]))
    assert "lowers its scale to 8.5" in result.overflow


def test_a_sparse_gradient_is_one_of_rows():
    class Sparse(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(40, DIM), initializer="uniform", name="table")

        def call(self, ids):
            return torch.nn.functional.embedding(ids, self.table.value, sparse=True)

        def compute_output_shape(self, shape):
            return (*shape, DIM)

    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(Sparse()(ids))))
    model.compile("sgd", "mse")
    result, _ = train_once(model, (IDS[:BATCH], Y[:BATCH]))
    (index, (found, rows)), *more = result.rows.items()
    assert (index, more) == (0, [])
    assert found.tolist() == np.unique(IDS[:BATCH]).tolist()
    assert rows.shape == (len(found), DIM)


def test_to_look_for_ids_changes_nothing():
    model = with_native_tables()
    first, second = tensors((IDS[:BATCH], Y[:BATCH])), tensors((IDS[BATCH:], Y[BATCH:]))
    held, _ = hold_tables(model, first, local=False)
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


def test_optimizers_of_a_loop_exchange_when_they_are_applied():
    model = dense(keras.optimizers.SGD(0.1))
    given = []

    def exchange(applied: Applied):
        given.append(applied)
        return [np.full(each.shape, 2.0, "float32") for each in model.weights]

    backend().placed(model, variable_specs(model), 1, exchange)
    model.train_step((torch.tensor(X[:BATCH]), torch.tensor(Y[:BATCH])))
    assert len(given[0].gradients) == len(model.trainable_weights)
    assert given[0].usable
    assert all((each.numpy() == 2).all() for each in model.weights)
