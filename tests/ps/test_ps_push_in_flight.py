"""Pushes of workers that die meanwhile: a server applies them wholly, or not at all."""

import json
import signal

import faulty_process
import keras
import numpy as np
import pytest
from ps_clients import client_of

from elasticcb.optimizers.state import ModelState
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.push import Movement
from elasticcb.sharding.table_state import TableSpec
from helpers_ps import assert_same
from warm import fork

INITIALIZER = json.dumps(keras.saving.serialize_keras_object(keras.initializers.RandomUniform()))
SPECS = (
    VariableSpec("dense/kernel", (6,), "float32", True),
    VariableSpec("norm/mean", (2,), "float32", False),
    VariableSpec("emb/embeddings", (0, 3), "float32", True, table=TableSpec(None, INITIALIZER, 7).to_json()),
)
VALUES = [np.arange(6, dtype=np.float32), np.zeros(2, np.float32), np.zeros((0, 3), np.float32)]
IDS = {2: np.array([1, 2])}


def push(address, event, done):
    """What a worker does that dies at an event of its push; "" for one that does not."""
    client = client_of([address], SPECS, True, client_id=7)
    client.lookup(IDS, create=True)
    client.pull()
    if event:
        faulty_process.arm({"event": event, "action": "kill", "nth": 1}, done)
    rows = {2: (IDS[2], np.ones((2, 3), np.float32))}
    moved, state = [{"float32": np.ones(6, np.float32)}], [{"float32": np.full(2, 0.5, np.float32)}]
    shares = [{"float32": np.ones(2, np.float32)}]
    client.push(Movement(1, client.servers.partition, moved, state, shares, rows), client.versions)
    client.servers.close()


def held(client):
    client.pull()
    return [*client.blocks[0].values(), client.lookup(IDS)[2]]


@pytest.mark.parametrize(
    ("event", "applied"), [("has sent half a call to a server", False), ("waits for a server's answer", True)]
)
def test_push_of_a_worker_that_dies_meanwhile_is_applied_wholly_or_not_at_all(start_servers, tmp_path, event, applied):
    disturbed, undisturbed = (start_servers(specs=SPECS).client() for _ in range(2))
    for client in (disturbed, undisturbed):
        client.initialize(ModelState(VALUES))
        client.lookup(IDS, create=True)
    before = held(disturbed)
    worker = fork(push, disturbed.servers.known[0].link.address, event, tmp_path / "done")
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    if applied:
        push(undisturbed.servers.known[0].link.address, "", None)
        before = held(undisturbed)
        while disturbed.version < 1:  # the server reads it when it likes
            disturbed.pull()
    assert disturbed.version == applied
    assert_same(held(disturbed), before)
