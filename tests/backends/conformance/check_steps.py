"""The steps of a backend, in this process: they come to what Keras's own `fit`, `evaluate` and `predict` come to."""

import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from compiled_models import RECORDS, X, Y, batches, dense, fit, halves, subclass
from elasticcb.compute.backend import HeldModel
from elasticcb.compute.registry import backend
from elasticcb.errors import ModelFileError
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.spec import Words
from elasticcb.model.weights import variable_specs
from elasticcb.optimizers.held_state import read_optimizers
from elasticcb.serialization import carry
from elasticcb.serialization.reducers import Hollow
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import partition
from own_steps import own_step

SPEC = SimpleNamespace(
    path="the model", loss_advice="Give it one.", words=Words("The model", "The data", "The program")
)


def tensors(batch):
    return tuple(None if each is None else keras.tree.map_structure(tf.constant, each) for each in batch)


def hold(model, batch, eval_metrics=None, mode=Mode.TRAINING, threshold=sys.maxsize):
    metrics = ModelMetrics(model, eval_metrics or {})
    updated = backend().build(SPEC, model, tensors(batch), mode)
    metrics.reset()
    tables = backend().find_tables(model, tensors(batch), mode, lambda index, size: size >= threshold)
    specs = variable_specs(model, updated, tables)
    return HeldModel(model, metrics, specs, mode is Mode.TRAINING)


def added_up(held, results):
    """What the metrics of a pass of training come to, as the master works it out."""
    units = results[0].states
    held.metrics.load(
        {name: held.metrics.merge_states(name, [each.states[name] for each in results]) for name in units}
    )
    return held.metrics.results(step="train")


def train(held, data):
    computation = backend().computation(held)
    results = [computation.train(computation.prepare(tensors(batch), Mode.TRAINING), {}) for batch in data]
    weights = computation.weights()
    return computation, results, weights


def assert_same(found, expected, tolerance=1e-5):
    keras.tree.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, tolerance, tolerance), found, expected
    )


def decayed():
    model = dense(keras.optimizers.AdamW(0.01, weight_decay=0.5))
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    return model


# That of a subclass, of dicts, is compared with sample weights below.
MODELS = {"functional": decayed, "own train_step": lambda: own_step(keras.optimizers.RMSprop(0.01))}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_fit(name):
    reference, model = MODELS[name](), MODELS[name]()
    history = fit(reference, X)
    held = hold(model, next(batches()))
    if name == "functional":
        assert {spec.no_weight_decay for spec in held.specs} == {False, True}
        model.optimizer.exclude_from_weight_decay(var_list=[])  # a worker's knows objects of another process
    computation, results, weights = train(held, batches())
    assert_same(weights, [variable.numpy() for variable in reference.weights])
    if name != "own train_step":  # whose logs `fit` shows of the last batch
        assert_same(added_up(held, results), {key: values[-1] for key, values in history.items()})
    assert set(added_up(held, results)) == set(history)
    expected, found = read_optimizers([reference.optimizer], reference.weights), computation.optimizer_state()
    assert_same(
        {str(key): value for key, value in found.slots.items()},
        {str(key): value for key, value in expected.slots.items()},
    )
    assert computation.shared_optimizer_state()["iterations"] == len(results)


def test_a_model_that_says_nothing_about_how_it_was_made_travels_with_the_layers_in_it():
    model = own_step("sgd")
    expected = model.predict(X, verbose=0)
    restored = carry.loads(carry.dumps(model, "model", hollow=Hollow(model.weights)))
    restored.build(X.shape)
    restored.set_weights(model.get_weights())
    assert_same(restored.predict(X, verbose=0), expected)


@pytest.mark.parametrize("trains", [True, False])
def test_only_training_builds_optimizers(trains):
    model = dense()
    backend().computation(hold(model, next(batches()), mode=Mode.TRAINING if trains else Mode.EVALUATION))
    assert model.optimizer.built is trains


def test_sample_weights_count_as_in_fit():
    weight = np.linspace(0, 2, RECORDS, dtype="float32")
    reference, model = subclass(), subclass()
    history = fit(reference, halves(X), sample_weight=weight)
    held = hold(model, next(batches(halves(X), Y, weight)))
    _, results, weights = train(held, batches(halves(X), Y, weight))
    assert_same(weights, [variable.numpy() for variable in reference.weights])
    assert_same(added_up(held, results), {key: values[-1] for key, values in history.items()})


class Errors(keras.metrics.MeanSquaredError):
    """Its result is a dict, which logs of batches do not have."""

    def result(self):
        return {"square": super().result(), "double": 2 * super().result()}


def test_evaluation_and_prediction_are_those_of_keras():
    model = dense(metrics=[keras.metrics.AUC(name="auc", num_thresholds=20), Errors()])
    drawn = np.random.default_rng(7)
    model.set_weights([drawn.uniform(-0.2, 1, each.shape) ** 2 for each in model.get_weights()])
    expected, predicted = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True), model.predict(X, verbose=0)
    held = hold(model, next(batches()), mode=Mode.EVALUATION, eval_metrics={"off": lambda y, p: keras.ops.abs(y - p)})
    computation = backend().computation(held)
    for batch in batches():
        logs, outputs = computation.evaluate(computation.prepare(tensors(batch), Mode.EVALUATION), {})
        assert outputs == ()
    results = held.metrics.results()
    assert_same(results.pop("off"), float(np.abs(predicted - Y).mean()))
    assert_same(results, expected)
    assert_same({key: logs[key] for key in expected}, expected)
    found = [computation.predict(computation.prepare(tensors(batch[:1]), Mode.PREDICTION), {}) for batch in batches()]
    assert all(isinstance(each, np.ndarray) for each in found)
    assert_same(np.concatenate(found), predicted)


class Worst(keras.metrics.Metric):
    """The largest error: neither adds up nor merges, so that outputs travel."""

    def __init__(self, name="worst"):
        super().__init__(name=name)
        self.value = self.add_variable((), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred))
        self.value.assign(keras.ops.maximum(self.value, error))

    def result(self):
        return self.value.value


def test_outputs_of_a_batch_travel_to_metrics_that_need_them():
    model = dense()
    held = hold(model, next(batches()), mode=Mode.EVALUATION, eval_metrics={"worst": Worst()})
    computation = backend().computation(held)
    sent = [computation.evaluate(computation.prepare(tensors(batch), Mode.EVALUATION), {})[1] for batch in batches()]
    labels, predictions = (np.concatenate([each[part] for each in sent]) for part in (0, 1))
    assert_same((labels, predictions), (Y, model.predict(X, verbose=0)))
    held.metrics.load({}, sent)
    assert_same(held.metrics.results({"worst"})["worst"], np.abs(Y - predictions).max())


def test_a_model_holds_the_weights_and_the_state_that_it_is_given():
    held = hold(dense(), next(batches()))
    computation, _, weights = train(held, batches())
    state = computation.optimizer_state()
    again = dense()
    other_held = hold(again, next(batches()))
    other = backend().computation(other_held)
    parts = partition(held.specs, 2, True)
    blocks = [pack_weights(weights, held.specs, slices) for slices in parts]
    other.set_weights(PlacedBlocks(blocks, parts))
    other.set_optimizer_state(state)
    for each in blocks:  # the memory of what was pulled is another pull's then
        for block in each.values():
            block[...] = 0
    assert_same([variable.numpy() for variable in again.weights], weights)
    one = computation.train(computation.prepare(tensors(next(batches())), Mode.TRAINING), {})
    two = other.train(other.prepare(tensors(next(batches())), Mode.TRAINING), {})
    assert one.logs == pytest.approx(two.logs, rel=1e-5)
    assert_same(computation.weights(), other.weights())


SLOTS = {
    "SGD": {"momentums"},
    "Adam": {"momentums", "velocities"},
    "AdamW": {"momentums", "velocities"},
    "RMSprop": {"velocities", "momentums", "average_gradients"},
    "Adagrad": {"accumulators"},
    "Nadam": {"momentums", "velocities"},
    "Ftrl": {"accumulators", "linears"},
    "Lion": {"momentums"},
}


@pytest.mark.parametrize("name", SLOTS)
def test_the_state_of_an_optimizer_has_the_same_names_everywhere(name):
    more = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    more |= {"centered": True} if name == "RMSprop" else {}
    model = dense(getattr(keras.optimizers, name)(0.01, **more))
    state = read_optimizers([model.optimizer], model.weights)
    assert {slot for _, slot in state.slots} == SLOTS[name]
    assert {"iterations", "learning_rate"} <= set(state.shared) <= {"iterations", "learning_rate", "u_product"}
    assert not state.extras


def test_a_loss_that_raises_is_told_with_the_batch():
    def loss(labels, predictions):
        raise ValueError("No such loss")

    model = dense()
    model.compile("adam", loss)
    with pytest.raises(ModelFileError, match=r"(?s)No such loss.*features.*\(16, 6\) float32"):
        hold(model, next(batches()))


def test_batches_that_the_framework_has_no_tensors_for_are_refused_in_words():
    computation = backend().computation(hold(dense(), next(batches()), mode=Mode.EVALUATION))
    for made, word in (
        (tf.ragged.constant([[1.0], [2.0, 3.0]]), "ragged"),
        (tf.sparse.from_dense([[0.0, 1.0]]), "sparse"),
        (tf.constant(["a"]), "strings"),
    ):
        with pytest.raises(ModelFileError, match=word):
            computation.prepare((made, made), Mode.EVALUATION)
