"""The client of all servers, against real servers on free ports."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import finish_version
from elasticcb.master.initial_model import InitialModel
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.sharding.flat_blocks import unpack_weights
from elasticcb.sharding.partition import VariableSpec, pack
from elasticcb.sharding.push import Gradients
from helpers_ps import CUT, SPECS, gradients, initial_values


@pytest.fixture
def job(start_servers):
    """Starts servers; gives the master's client, and a function that makes a worker's."""

    def start(specs=CUT, split=True, **training):
        cluster = start_servers(specs=specs, split=split, **training)
        master = cluster.client()
        master.initialize(InitialModel(initial_values(specs)))
        return master, cluster.client

    return start


def step(client, number):
    """A push of dense gradients of everything that is trained."""
    dense = gradients(number, client.servers.specs)
    blocks = [pack(dense, client.servers.specs, slices, True) for slices in client.servers.partition]
    return Gradients(blocks, tuple(sorted(dense)), {}, [{} for _ in blocks], [{} for _ in blocks], 1.0)


def movement(client, number, batches):
    return replace(step(client, number), batches=batches, partition=client.servers.partition)


def weights(client):
    return unpack_weights(client.blocks, client.servers.specs, client.servers.partition)


def versions(client):
    return {server.version for server in client.servers.known}


def assert_same(some, others):
    for mine, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_after_a_synchronous_push_all_weights_are_of_one_version(job):
    master, client = job(num_ps=2, use_async=False, sync_version_tolerance=1)
    one, two = client(1), client(2)
    one.pull()
    two.pull()
    one.push(step(one, 0), None)
    # Server 1 holds newer weights than this worker's when its push is staged there.
    assert two.push(step(two, 1), None).status == pb.ACCEPTED
    assert versions(two) == {2}
    master.pull()
    assert_same(weights(two), weights(master))


def test_gradients_on_weights_of_two_versions_count_as_of_the_older_one(job):
    _, client = job(num_ps=2, use_async=False)
    one, two = client(1), client(2)
    one.pull()
    two.pull()
    one.push(step(one, 0), None)
    # A pull that went to server 1 before the update and to server 0 after it.
    two._exchange(two.servers.known[:1], [two._request(two.servers.known[0], None, pull=True)])
    assert versions(two) == {0, 1}
    assert two.push(step(two, 1), None).status == pb.STALE
    assert versions(two) == {1}


def test_a_push_that_one_server_refuses_is_not_decided_by_the_first(job):
    specs = (*CUT, VariableSpec("norm/moving_variance", (64,), "float32", False))
    master, client = job(specs, num_ps=2, use_async=False)
    worker = client(1)
    worker.pull()
    bad = step(worker, 0)
    bad.state[1] = {"float32": np.full(64, np.nan, np.float32)}
    bad.shares[1] = {"float32": np.ones(64, np.float32)}
    refused = worker.push(bad, None)
    assert refused.status == pb.NON_FINITE
    assert "norm/moving_variance" in refused.reason
    assert worker.push(step(worker, 1), None).status == pb.ACCEPTED
    master.pull()
    assert master.version == 1


def test_a_server_without_trainable_variables_follows_the_versions(job):
    _, client = job(SPECS, False, num_ps=5, use_async=False, sync_version_tolerance=2)
    one, two = client(1), client(2)
    assert any(not any(SPECS[part.variable].trainable for part in slices) for slices in one.servers.partition)
    one.pull()
    two.pull()
    assert versions(two) == {0}
    for number in range(2):
        assert one.push(step(one, number), None).status == pb.ACCEPTED
    assert two.push(step(two, 2), None).status == pb.ACCEPTED
    assert versions(two) == {3}


def test_waiting_gradients_reach_all_servers_when_training_finishes(job):
    master, client = job(num_ps=2, use_async=False, grads_to_wait=2)
    worker = client(1)
    worker.pull()
    before = weights(worker)
    worker.push(step(worker, 0), None)
    assert master.finish_training() == 1
    master.pull()
    np.testing.assert_allclose(weights(master)[0], before[0] - 0.5 * gradients(0, CUT)[0], rtol=1e-4, atol=1e-5)


def test_snapshots_and_checkpoints_hold_all_servers_at_one_version(job, tmp_path):
    master, client = job(num_ps=2, use_async=False)
    worker = client(1)
    worker.pull()
    before = weights(worker)
    first = master.servers.known[0]
    # Only the first server was asked when an update comes.
    master.servers.call(first, "Snapshot", pb.SnapshotRequest(evaluation_round=1))
    master.servers.call(first, "Save", pb.SaveRequest(directory=str(tmp_path), hold=True))
    worker.push(step(worker, 0), None)
    assert master.snapshot(1) == 0
    snapshot = unpack_weights(master.pull_snapshot(1), CUT, master.servers.partition)
    assert_same(snapshot, before)
    saved = master.servers.on_all("Save", pb.SaveRequest(directory=str(tmp_path)))
    assert [answer.version for answer in saved] == [0, 0]
    files = [SavedFile(answer.file, answer.bytes, answer.sha256) for answer in saved]
    folder = tmp_path / "new"
    folder.mkdir()
    for file in files:
        (tmp_path / file.name).rename(folder / file.name)
    final = finish_version(folder, version=0, specs=CUT, parts=master.servers.partition, files=files)
    master.initialize(InitialModel(checkpoint=str(final)))
    master.pull()
    assert_same(weights(master), before)


def test_a_worker_whose_movement_waited_for_others_in_vain_knows_what_it_came_to(job):
    master, client = job(updates="local")
    one, two = client(1), client(2)
    two.push(movement(two, 1, batches=4), None)
    one.pull()
    result = one.push(movement(one, 2, batches=4), None)  # worker 2 took part in the round before
    assert result.optimizers is not None
    assert one.version == 8
    master.pull()
    assert_same(weights(one), weights(master))


def test_workers_know_what_servers_hold_however_their_movements_meet(job):
    _, client = job(num_ps=2, updates="local")
    compared = []

    def work(worker):
        own, other, chance = client(worker), client(worker + 10), random.Random(worker)
        own.pull()
        for number in range(12):
            time.sleep(chance.choice((0.0, 0.0, 0.005, 0.05)))
            own.push(movement(own, number, chance.randint(1, 9)), None)
            other.pull()
            if other.versions == own.versions:
                assert_same(weights(own), weights(other))
                compared.append(worker)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, (1, 2, 3)))
    assert set(compared) == {1, 2, 3}
