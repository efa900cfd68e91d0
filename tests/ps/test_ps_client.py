"""The client of all servers, against real servers on free ports."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticcb.optimizers.state import ModelState
from elasticcb.sharding.flat_blocks import unpack_weights
from elasticcb.sharding.partition import pack
from elasticcb.sharding.push import Movement
from helpers_ps import CUT, SPECS, assert_same, initial_values, movements


@pytest.fixture
def job(start_servers):
    """Starts servers; gives the master's client, and a function that makes a worker's."""

    def start(specs=CUT, split=True, **training):
        cluster = start_servers(specs=specs, split=split, **training)
        master = cluster.client()
        master.initialize(ModelState(initial_values(specs)))
        return master, cluster.client

    return start


def movement(client, number, batches=1):
    """How far a worker has moved everything that is trained."""
    specs, parts = client.servers.specs, client.servers.partition
    moved = [pack(movements(number, specs), specs, slices, True) for slices in parts]
    return Movement(batches, parts, moved, [{} for _ in parts], [{} for _ in parts])


def weights(client):
    return unpack_weights(client.blocks, client.servers.specs, client.servers.partition)


@pytest.mark.parametrize("num_ps", [1, 2, 5])
def test_workers_of_a_round_continue_from_the_same_weights(job, pool, num_ps):
    master, client = job(SPECS if num_ps == 5 else CUT, num_ps < 5, num_ps=num_ps, updates="sync")
    workers = [client(number) for number in (1, 2, 3)]
    for worker in workers:
        worker.pull(joins=True)
    for turn in range(3):
        done = [
            pool.submit(worker.push, movement(worker, 10 * turn + i), worker.versions)
            for i, worker in enumerate(workers)
        ]
        assert {answer.result(20).version for answer in done} == {3 * (turn + 1)}
        master.pull()
        for worker in workers:
            assert set(worker.versions) == {3 * (turn + 1)}
            assert_same(weights(worker), weights(master))


def test_a_worker_whose_others_rest_is_alone(job):
    master, client = job(num_ps=2, updates="sync")
    one, two = client(1), client(2)
    for worker in (one, two):
        worker.pull(joins=True)
    two.rest()
    result = one.push(movement(one, 2, batches=4), one.versions)
    assert (one.version, result.optimizers) == (4, None)
    master.pull()
    assert_same(weights(one), weights(master))


def test_workers_know_what_servers_hold_however_their_movements_meet(job):
    _, client = job(num_ps=2, updates="local")
    compared = []

    def work(worker):
        own, other, chance = client(worker), client(worker + 10), random.Random(worker)
        own.pull(joins=True)
        for number in range(12):
            time.sleep(chance.choice((0.0, 0.0, 0.005, 0.05)))
            own.push(movement(own, number, chance.randint(1, 9)), own.versions)
            other.pull()
            if other.versions == own.versions:
                assert_same(weights(own), weights(other))
                compared.append(worker)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, (1, 2, 3)))
    assert set(compared) == {1, 2, 3}
