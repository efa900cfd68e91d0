"""Rounds of one batch: workers whose movements are averaged after each batch train as one on the joined batch."""

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from check_steps import assert_same, hold, tensors
from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_places import Places, ServerPlace
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.compute.registry import backend
from elasticcb.master.initial_model import InitialModel
from elasticcb.master.ps_admin import PSControl
from elasticcb.optimizers.variables import described
from elasticcb.process.stats import Measures
from elasticcb.ps.server import PSServer
from elasticcb.settings import Command, JobSettings, Mode, ModelSettings, TrainingSettings
from elasticcb.sharding.bucket_map import even
from elasticcb.worker.local_updates import LocalUpdates
from elasticcb.worker.window_length import WindowLength

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
    yield Places([ServerPlace(server.address, 0) for server in servers], even(SERVERS))
    for server in servers:
        server.stop(0)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_synchronous_workers_train_as_fit_on_the_joined_batch(name, workers, places):
    generator = np.random.default_rng(workers)
    x = generator.normal(size=(ROUNDS * workers * BATCH, 5)).astype("float32")
    y = np.sin(x.sum(1, keepdims=True))
    reference = make(name)
    reference.fit(x, y, batch_size=workers * BATCH, shuffle=False, verbose=0)

    first = (tf.constant(x[:BATCH]), tf.constant(y[:BATCH]))
    held = [hold(make(name), first) for _ in range(workers)]
    specs, model = held[0].specs, held[0].model
    clients = [PSClient(ServerGroup(places, specs, True), 1 + worker) for worker in range(workers)]
    control = PSControl(PSClient(ServerGroup(places, specs, True)), "rounds", described([model.optimizer], specs))
    control.initialize(InitialModel([variable.numpy() for variable in model.weights]))
    computations = [backend().computation(each) for each in held]
    local = [
        LocalUpdates(computation, client, WindowLength(1), Measures())
        for computation, client in zip(computations, clients, strict=True)
    ]
    with ThreadPoolExecutor(workers) as pool:
        for each in local:
            each.follow()
        for start in range(0, len(x), BATCH * workers):
            for place, (computation, each) in enumerate(zip(computations, local, strict=True)):
                own = slice(start + place * BATCH, start + (place + 1) * BATCH)
                computation.train(computation.prepare(tensors((x[own], y[own])), Mode.TRAINING), {})
                each.count()
            list(pool.map(lambda each: each.merge(ends_task=False), local))
    weights, _ = control.client.weights()
    for each in (*clients, control.client):
        each.servers.close()
    assert_same(weights, [variable.numpy() for variable in reference.weights])
    assert control.client.version == ROUNDS * workers
