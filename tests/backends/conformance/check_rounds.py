"""Rounds of one batch: workers whose movements are averaged after each batch train as one on the joined batch."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from check_steps import assert_same, hold, tensors
from deep_cases import deep_but
from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.compute.registry import backend
from elasticcb.master.ps_admin import PSControl
from elasticcb.optimizers.state import ModelState, OptimizerState
from elasticcb.optimizers.variables import described
from elasticcb.process.stats import Measures
from elasticcb.ps.server import PSServer
from elasticcb.settings import Command, JobSettings, Mode, ModelSettings, TrainingSettings
from elasticcb.sharding.partition import Places, ServerPlace, ShardMap
from elasticcb.worker.local_updates import LocalUpdates, WindowLength

BATCH, ROUNDS, SERVERS = 8, 6, 2
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
}


def make(name):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(1)])
    model.compile(OPTIMIZERS[name](), "mse")
    return model


@pytest.fixture
def places():
    training = TrainingSettings(updates="sync")
    settings = JobSettings(command=Command.TRAIN, name="rounds", directory="", model=ModelSettings(), training=training)
    servers = [PSServer(settings, lambda count: []) for _ in range(SERVERS)]
    for server in servers:
        server.start()
    yield Places([ServerPlace(server.address, 0) for server in servers], ShardMap(SERVERS))
    for server in servers:
        server.stop(0)


class Workers:
    """Workers that train a model on batches of their own, by real servers."""

    def __init__(self, places, name, workers, x, y):
        held = [hold(make(name), (tf.constant(x[:BATCH]), tf.constant(y[:BATCH]))) for _ in range(workers)]
        specs, model = held[0].specs, held[0].model
        self.x, self.y = x, y
        self.clients = [PSClient(ServerGroup(places, specs, True), 1 + worker) for worker in range(workers)]
        client = PSClient(ServerGroup(places, specs, True))
        self.control = PSControl(client, "rounds", described([model.optimizer], specs))
        self.control.initialize(ModelState([variable.numpy() for variable in model.weights]))
        self.computations = [backend().computation(each) for each in held]
        self.local = [
            LocalUpdates(computation, client, WindowLength(1), Measures())
            for computation, client in zip(self.computations, self.clients, strict=True)
        ]
        for each in self.local:
            each.follow()

    def train(self, start):
        """Each trains on one batch, from the record at `start` on, and merges."""
        for place, (computation, each) in enumerate(zip(self.computations, self.local, strict=True)):
            own = slice(start + place * BATCH, start + (place + 1) * BATCH)
            computation.train(computation.prepare(tensors((self.x[own], self.y[own])), Mode.TRAINING), {})
            each.count()
        with ThreadPoolExecutor(len(self.local)) as pool:
            list(pool.map(lambda each: each.merge(ends_task=False), self.local))

    def close(self):
        for each in (*self.clients, self.control.client):
            each.servers.close()


def records(count):
    x = np.random.default_rng(count).normal(size=(count, 5)).astype("float32")
    return x, np.sin(x.sum(1, keepdims=True))


@pytest.mark.parametrize("case", deep_but(itertools.product(OPTIMIZERS, (2, 3)), ("momentum", 2), ("nesterov", 3)))
def test_synchronous_workers_train_as_fit_on_the_joined_batch(case, places):
    name, workers = case
    x, y = records(ROUNDS * workers * BATCH)
    reference = make(name)
    reference.fit(x, y, batch_size=workers * BATCH, shuffle=False, verbose=0)
    some = Workers(places, name, workers, x, y)
    for start in range(0, len(x), BATCH * workers):
        some.train(start)
    weights, _ = some.control.client.weights()
    some.close()
    assert_same(weights, [variable.numpy() for variable in reference.weights])
    assert some.control.client.version == ROUNDS * workers


def test_optimizer_state_that_the_master_sets_reaches_all_workers(places):
    some = Workers(places, "momentum", 2, *records(4 * BATCH))
    some.train(0)
    state = some.control.export().optimizer
    key = min(state.slots)
    state.slots = {key: np.full_like(state.slots[key], 7.0)}
    some.control.load_state(None, OptimizerState(state.slots))
    for each in some.local:
        each.follow()
    for computation in some.computations:
        np.testing.assert_array_equal(computation.optimizer_state().slots[key], state.slots[key])
    some.train(2 * BATCH)
    assert not np.array_equal(some.computations[0].optimizer_state().slots[key], state.slots[key])
    some.close()
