"""Functions of `Cluster.schedule` that train a model which was placed on the servers."""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from waiting import wait_until

import elasticcb
from elasticcb.errors import FunctionError, NonFiniteError, UsageError

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 64, 8)]


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(num_workers=1, num_ps=2, kind="inprocess") as cluster:
        yield cluster


def make_model(optimizer="adam", layers=None):
    keras.utils.set_random_seed(1)
    normalization = keras.layers.BatchNormalization()
    layers = layers or [keras.layers.Dense(8, activation="relu"), normalization, keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def make_step(model):
    optimizer = model.optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


@pytest.mark.parametrize(
    ("wrap", "optimizer"),
    [
        (lambda step: step, keras.optimizers.Adam),
        (tf.function, lambda: keras.optimizers.Lamb(global_clipnorm=0.5)),
    ],
)
def test_loop_of_one_worker_ends_where_the_same_loop_in_keras_ends(cluster, wrap, optimizer):
    placed, plain = (make_model(optimizer()) for _ in range(2))
    cluster.place(placed)
    step, own_step = wrap(make_step(placed)), wrap(make_step(plain))
    for _ in range(2):
        values = [cluster.schedule(step, x, y) for x, y in BATCHES]
        cluster.join()
        losses = [own_step(x, y).numpy() for x, y in BATCHES]
        np.testing.assert_allclose(cluster.fetch(values), losses, rtol=1e-5)
    for weight, own in zip(placed.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, own, rtol=1e-5, atol=1e-6)
    assert int(placed.optimizer.iterations) == 2 * len(BATCHES)
    for variable, own in zip(placed.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), own.numpy(), rtol=1e-5, atol=1e-6)


def test_several_updates_in_one_function_see_each_other(cluster):
    placed, plain = make_model("sgd"), make_model("sgd")
    cluster.place(placed)
    step, own_step = make_step(placed), make_step(plain)

    @tf.function
    def steps(x, y):
        return [step(x, y) for _ in range(3)]

    values = cluster.schedule(steps, *BATCHES[0]).fetch()
    np.testing.assert_allclose(values, [own_step(*BATCHES[0]).numpy() for _ in range(3)], rtol=1e-5)


def test_function_that_fails_changes_nothing_and_one_without_updates_moves_nothing(cluster):
    placed, plain = make_model(), make_model()
    cluster.place(placed)
    step, own_step = make_step(placed), make_step(plain)

    def fails(x, y):
        step(x, y)
        raise ValueError("as it should")

    for number in range(2):  # at first, the servers lack the optimizer's slots
        cluster.schedule(fails, *BATCHES[0])
        with pytest.raises(FunctionError, match="as it should"):
            cluster.join()
        cluster.schedule(step, *BATCHES[number])
        own_step(*BATCHES[number])
    cluster.join()
    assert cluster.schedule(lambda x: placed(x).numpy().shape, X[:2]).fetch() == (2, 1)
    cluster.join()
    assert int(placed.optimizer.iterations) == 2
    for weight, own in zip(placed.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, own, rtol=1e-5, atol=1e-6)


def test_weights_that_a_function_assigns_are_kept(cluster):
    model = make_model("sgd", [keras.layers.Dense(1)])

    def assign():
        model.layers[0].kernel.assign(np.full((4, 1), 2.0, "float32"))

    cluster.place(model)
    cluster.schedule(assign)
    cluster.join()
    np.testing.assert_allclose(model.get_weights()[0], 2, rtol=1e-6)


class Pair(keras.Model):
    """Two networks, each with an optimizer of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.left, self.right = keras.layers.Dense(1), keras.layers.Dense(1)

    def build(self, shape):
        self.left.build(shape)
        self.right.build(shape)

    def call(self, x):
        return self.left(x) + self.right(x)

    def compile(self, left, right):
        super().compile()
        self.left_optimizer, self.right_optimizer = left, right


def make_pair():
    keras.utils.set_random_seed(1)
    pair = Pair()
    pair.build((None, 4))
    pair.compile(keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01))
    pair.left_optimizer.build(pair.left.trainable_variables)
    pair.right_optimizer.build(pair.right.trainable_variables)
    return pair


def make_steps_of_pair(pair):
    def step(x, y):
        for layer, optimizer in ((pair.left, pair.left_optimizer), (pair.right, pair.right_optimizer)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((pair(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return loss

    return step


def test_two_optimizers_in_turns_do_what_they_do_in_keras(cluster):
    placed, plain = make_pair(), make_pair()
    cluster.place(placed)
    step, own_step = make_steps_of_pair(placed), make_steps_of_pair(plain)
    for x, y in BATCHES:
        cluster.schedule(step, x, y)
        own_step(x, y)
    cluster.join()
    for weight, own in zip(placed.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, own, rtol=1e-5, atol=1e-6)


def test_rate_that_a_function_sets_acts_on_its_worker_and_the_callers_on_what_is_scheduled_after_it(cluster):
    model = make_model("sgd", [keras.layers.Dense(1)])
    before = model.get_weights()
    cluster.place(model)
    step = make_step(model)

    def still(x, y):
        model.optimizer.learning_rate = 0.0
        step(x, y)

    cluster.schedule(still, *BATCHES[0])
    cluster.join()
    assert all((old == new).all() for old, new in zip(before, model.get_weights(), strict=True))
    model.optimizer.learning_rate = 0.1
    cluster.schedule(step, *BATCHES[0])
    model.optimizer.learning_rate = 0.0
    cluster.join()
    trained = model.get_weights()
    assert not any((old == new).all() for old, new in zip(before, trained, strict=True))
    assert float(model.optimizer.learning_rate) == 0.0
    cluster.schedule(step, *BATCHES[1])
    cluster.join()
    assert all((old == new).all() for old, new in zip(trained, model.get_weights(), strict=True))


def test_fit_goes_on_where_functions_ended_and_functions_where_fit_ended(cluster):
    placed, plain = make_model(), make_model()
    cluster.place(placed)
    step, own_step = make_step(placed), make_step(plain)
    cluster.schedule(step, *BATCHES[0])
    cluster.fit(placed, X, Y, shuffle=False, verbose=0)
    cluster.schedule(step, *BATCHES[0])
    cluster.join()
    own_step(*BATCHES[0])
    plain.fit(X, Y, shuffle=False, verbose=0)
    own_step(*BATCHES[0])
    for weight, own in zip(placed.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, own, rtol=1e-5, atol=1e-6)


def test_weights_that_are_not_finite_fail_the_function_and_are_dropped(cluster):
    model = make_model()
    before = model.get_weights()
    cluster.place(model)
    cluster.schedule(tf.function(make_step(model)), X[:8] * np.nan, Y[:8])
    with pytest.raises(FunctionError, match=r"The new value of '.*' holds NaN or infinity") as caught:
        cluster.join()
    assert isinstance(caught.value.__cause__, NonFiniteError)
    assert all((old == new).all() for old, new in zip(before, model.get_weights(), strict=True))


def test_model_that_can_not_be_placed_is_refused(cluster):
    with pytest.raises(UsageError, match="is not built"):
        cluster.place(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(UsageError, match="has no optimizer"):
        cluster.place(keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)]))
    with pytest.raises(UsageError, match=r"takes a keras\.Model"):
        cluster.place("model")
    pair = Pair()
    pair.build((None, 4))
    pair.compile(keras.optimizers.SGD(), keras.optimizers.SGD())
    with pytest.raises(UsageError, match=r"none of them trains '.*'.*optimizer.build\(variables\)"):
        cluster.place(pair)
    with pytest.raises(UsageError, match="Remove updates"):
        elasticcb.Cluster(updates="sync").place(make_model())


def test_functions_of_a_killed_worker_run_again_and_each_has_one_result(tmp_path):
    def work(folder, number):
        import os
        import pathlib
        import time

        with open(pathlib.Path(folder, f"runs-{number}"), "a") as file:
            file.write(f"{os.getpid()}\n")
        while not pathlib.Path(folder, "go").exists():
            time.sleep(0.01)
        step(*BATCHES[number])
        return number * number

    model = make_model()
    step = make_step(model)
    with elasticcb.Cluster(num_workers=2) as cluster:
        cluster.place(model)
        values = [cluster.schedule(work, str(tmp_path), number) for number in range(8)]
        wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == 2)
        os.kill(int((tmp_path / "runs-0").read_text()), signal.SIGKILL)
        (tmp_path / "go").touch()
        cluster.join()
        assert cluster.fetch(values) == [number * number for number in range(8)]
    runs = [len((tmp_path / f"runs-{number}").read_text().splitlines()) for number in range(8)]
    assert runs == [2, 1, 1, 1, 1, 1, 1, 1]
    assert int(model.optimizer.iterations) == 8  # the one that was killed had made no update
