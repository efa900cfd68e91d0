"""Servers become more and fewer while clients push: each acknowledged push counts once, on every row and element."""

from __future__ import annotations

import threading
from dataclasses import replace

import keras
import numpy as np
import pytest
from ps_clients import TrainingControl, places_at

from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.errors import ElasticCBError
from elasticcb.master.server_scaling import Pause, end_pause
from elasticcb.optimizers.state import ModelState
from elasticcb.ps.server import PSServer
from elasticcb.settings import EmbeddingOptions, TrainingSettings, WhenFull
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.partition import VariableSpec, block_sizes, pack
from elasticcb.sharding.push import Movement
from elasticcb.sharding.table_state import TableSpec, joined
from helpers_ps import RowNorms, alone, assert_same, server_settings

IDS = 400
AGED = TableSpec(None, '"zeros"', 1, TableOptions(max_age="7d"))
SPECS = (
    VariableSpec("users/embeddings", (0, 4), "float32", True, table=AGED.to_json()),
    VariableSpec("dense/kernel", (300, 64), "float32", True),
    VariableSpec("dense/bias", (64,), "float32", True),
    VariableSpec("norm/moving_mean", (64,), "float32", False),
    VariableSpec("norm/count", (), "int64", False),
)


class Servers:
    """Real servers, and the master's side of their move."""

    def __init__(self, count, make_optimizer, folder, embedding=None, **training):
        training = {"updates": "async", **training}
        embedding = embedding or EmbeddingOptions()
        settings = server_settings(folder, training=TrainingSettings(**training), embedding=embedding)
        self._new = lambda: PSServer(settings, alone(make_optimizer))
        self.servers = []
        self.changed = threading.Condition()
        self._start(count)
        self.control = TrainingControl(
            [s.address for s in self.servers], SPECS, True, ids=self.ids, folder=folder / "recovery"
        )
        self.control.initialize(ModelState(weights_of()))
        self.places = places_at([s.address for s in self.servers], self.ids, self.control.servers.shard_map)
        self.clients = []

    @property
    def ids(self):
        return list(range(1, len(self.servers) + 1))

    def _start(self, count):
        while len(self.servers) < count:
            self.servers.append(self._new())
            self.servers[-1].start()

    def client(self, number):
        def find_map(version):
            with self.changed:
                assert self.changed.wait_for(lambda: self.places.shard_map.version >= version, 60)
                return self.places

        def find(index, unreachable):
            with self.changed:
                known = self.places.servers
                return dict(enumerate(known)).get(index, ("", 0))

        places = self.places
        group = ServerGroup(places, SPECS, True, find=find, find_map=find_map)
        client = PSClient(group, number)
        self.clients.append(client)
        return client

    def move(self, count, commit=lambda: None):
        """As `master.servers.Servers` does it."""
        self._start(count)
        pause, shard_map = Pause(self.control, is_up=lambda worker: True), self.control.servers.shard_map.resized(count)
        try:
            pause.begin()
            commit()
        except BaseException:
            end_pause(self.control)
            raise
        places = places_at([s.address for s in self.servers[:count]], self.ids[:count], shard_map)
        self.control.follow(places)
        for index, place in enumerate(places.servers):
            restored = self.control.restore(index, *place, 0, lambda: None, 0, None)
            assert restored.source == "its recovery files"
        with self.changed:
            self.places = places
            self.changed.notify_all()
        for server in self.servers[count:]:
            server.stop(0)
        del self.servers[count:]

    def close(self):
        for client in [*self.clients, self.control]:
            client.servers.close()
        for server in self.servers:
            server.stop(0)


def weights_of():
    return [np.zeros((0, 4) if spec.table else spec.shape, spec.dtype) for spec in SPECS]


def push_of(client, ids, amount):
    """Gradients of rows, and a movement, whose every element is `amount`."""
    parts = client.servers.partition
    moved = {1: np.full(SPECS[1].shape, -amount, np.float32), 2: np.full(SPECS[2].shape, -amount, np.float32)}
    state = [np.full(spec.shape, 1, spec.dtype) for spec in SPECS]
    slots = {f"slots/{index}/memory": array for index, array in moved.items()}
    return Movement(
        batches=1,
        partition=parts,
        moved=[pack(moved, SPECS, slices, True) for slices in parts],
        state=[pack(state, SPECS, slices, False) for slices in parts],
        shares=[{d: np.ones(n, np.float32) for d, n in block_sizes(SPECS, slices, False).items()} for slices in parts],
        rows={0: (ids, np.full((len(ids), 4), amount, np.float32))},
        optimizers={**slots, "shared/iterations": np.int64(client.version)},
    )


def await_pushes(servers):
    model = servers.servers[0]._servicer.holder.model
    before = model.parameters.version
    with model.merged:
        assert model.merged.wait_for(lambda: model.parameters.version >= before + 5, 60)


@pytest.fixture
def start(tmp_path):
    running = []

    def start(count, make_optimizer=lambda: keras.optimizers.SGD(1.0), **more):
        running.append(Servers(count, make_optimizer, tmp_path / str(len(running)), **more))
        return running[-1]

    yield start
    for servers in running:
        servers.close()


def test_each_push_counts_once_while_servers_become_more_and_fewer(start):
    servers = start(1)
    done, stop = {}, threading.Event()

    def work(number):
        client, random = servers.client(number), np.random.default_rng(number)
        client.pull()
        counts, pushes = np.zeros(IDS), 0
        while not stop.is_set():
            ids = np.unique(random.integers(0, IDS, 60))
            following = np.unique(random.integers(0, IDS, 60))
            result = client.push(push_of(client, ids, -1.0), (), {0: following})
            assert result.rows[0].shape == (len(following), 4)
            counts[ids] += 1
            pushes += 1
        done[number] = counts, pushes

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    try:
        for count in (3, 2, 4, 1):
            await_pushes(servers)
            servers.move(count)
        await_pushes(servers)
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    assert sorted(done) == [1, 2, 3]
    pushes = sum(count for _, count in done.values())
    weights, ids = servers.control.weights()
    expected = sum(counts for counts, _ in done.values())
    rows = np.zeros((IDS, 4))
    rows[ids[0]] = weights[0]
    np.testing.assert_array_equal(rows, np.repeat(expected[:, None], 4, axis=1))
    assert {server.version for server in servers.control.servers.known} == {pushes}
    for value in weights[1:3]:  # movements count by the number of workers
        assert ((value > pushes / 3 - 1) & (value < pushes)).all()
    assert ((weights[3] > 0) & (weights[3] <= 1)).all()
    assert weights[4] == 1
    assert pushes > 20


def test_slots_and_counts_of_rows_move_along(start):
    servers, still = (start(count, lambda: RowNorms(0.1)) for count in (1, 2))
    ids = np.arange(IDS, dtype=np.int64)
    for each in (servers, still):
        client = each.client(1)
        for step in range(4):
            client.pull()
            client.lookup({0: ids[step:]}, create=True)
            client.push(push_of(client, ids[step * 10 :], 1.0 + step), client.versions)
            if each is servers and step == 1:
                servers.move(3)
            elif each is servers and step == 2:
                servers.move(2)
    assert_same(servers.control.weights()[0], still.control.weights()[0])
    mine, other = servers.control.export(), still.control.export()
    assert mine.optimizer.slots.keys() == other.optimizer.slots.keys()
    for key, slot in other.optimizer.slots.items():
        np.testing.assert_array_equal(mine.optimizer.slots[key], slot)
    for name, value in other.optimizer.shared.items():
        np.testing.assert_array_equal(mine.optimizer.shared[name], value)
    kept, new = (each._servicer.holder.model.parameters.tables.ages()[0] for each in servers.servers)
    np.testing.assert_allclose(kept[0], new[0], rtol=0, atol=1)  # version, and since when, in whole seconds


def test_rows_on_disk_move_along(start):
    embedding = EmbeddingOptions(memory_bytes=60 * 96, when_full=WhenFull.DISK)  # 60 rows
    servers = start(1, lambda: keras.optimizers.Adam(0.1), embedding=embedding)
    still = start(2, lambda: keras.optimizers.Adam(0.1))
    random, counts = np.random.default_rng(0), {20: 3, 40: 2, 50: 1}
    for step in range(60):
        ids = np.sort(random.permutation(IDS)[:40]).astype(np.int64)
        for each in (servers, still):
            client = each.clients[0] if step else each.client(1)
            client.pull()
            client.lookup({0: ids}, create=True)
            client.push(push_of(client, ids, 1.0 + step), client.versions)
        if step in counts:
            servers.move(counts[step])
    ids = np.arange(IDS + 5, dtype=np.int64)
    mine, other = (each.control.lookup({0: ids})[0] for each in (servers, still))
    np.testing.assert_array_equal(mine, other)
    tables = servers.servers[0]._servicer.holder.model.parameters.tables
    assert len(tables[0]) > IDS - 20
    assert tables[0].bytes <= embedding.memory_bytes
    moved, kept = (
        tables[0].export(),
        joined([each._servicer.holder.model.parameters.tables[0].export() for each in still.servers]),
    )
    for name, slot in kept.slots.items():
        np.testing.assert_array_equal(moved.slots[name], slot)
    np.testing.assert_array_equal(moved.hits, kept.hits)


def test_a_move_that_fails_before_it_counts_leaves_all_as_it_was(start):
    servers = start(2)
    client = servers.client(1)
    client.pull()
    ids = np.arange(IDS, dtype=np.int64)
    client.push(push_of(client, ids, -1.0))

    def fail():
        raise ElasticCBError("The disk is full.")

    with pytest.raises(ElasticCBError, match="The disk is full"):
        servers.move(3, commit=fail)
    client.push(push_of(client, ids, -1.0))
    assert client.servers.shard_map.version == 0
    np.testing.assert_array_equal(servers.control.weights()[0][0], np.full((IDS, 4), 2.0))
    servers.move(3)
    client.push(push_of(client, ids, -1.0))
    assert len(client.servers.partition) == 3
    np.testing.assert_array_equal(servers.control.weights()[0][0], np.full((IDS, 4), 3.0))


def test_a_push_that_one_server_has_taken_is_taken_by_all_before_they_move(start):
    servers = start(2)
    client = servers.client(1)
    client.pull()
    ids = np.arange(IDS, dtype=np.int64)
    push = push_of(client, ids, -1.0)
    # The worker has reached server 0 alone so far.
    client._sequence = 1
    client._exchanged = lambda frames: [client.servers.send(client.servers.known[0], frames[0])]
    with pytest.raises(ValueError, match="zip"):
        client._push(push, (), {})
    del client._exchanged
    moving = threading.Thread(target=servers.move, args=(3,))
    moving.start()
    client._sequence = 0
    client.push(push)  # the same push, to all of them
    moving.join()
    client.push(push_of(client, ids, -1.0))
    weights, _ = servers.control.weights()
    for value in weights[:3]:
        np.testing.assert_array_equal(value, np.full(value.shape, 2.0))


def test_a_push_cut_for_other_servers_is_cut_anew(start):
    servers = start(2)
    client = servers.client(1)
    client.pull()
    before = push_of(client, np.arange(IDS, dtype=np.int64), -1.0)
    halved = replace(before, state=[{}, before.state[1]], shares=[{}, before.shares[1]])
    servers.move(3)
    client.push(halved)
    weights, _ = servers.control.weights()
    np.testing.assert_array_equal(weights[1], np.full(SPECS[1].shape, 1.0))
    assert weights[3].sum() + weights[4] == sum(values.sum() for values in before.state[1].values())


def test_the_files_of_the_servers_before_serve_until_those_of_the_new_ones_are_written(start, tmp_path):
    servers = start(2)
    client = servers.client(1)
    client.pull()
    ids = np.arange(IDS, dtype=np.int64)
    client.push(push_of(client, ids, -1.0))
    servers.move(3)
    for index, server in enumerate(servers.servers):  # lost before anything was written by the new map
        restored = servers.control.restore(index, server.address, index + 1, 1, lambda: None, 0, None)
        assert (restored.source, restored.version) == ("its recovery files", 1)
    weights, _ = servers.control.weights()
    for value in weights[:3]:
        np.testing.assert_array_equal(value, np.full(value.shape, 1.0))
    servers.control.persist()
    assert len(servers.control.recovery.manifest()["servers"]) == 3
    client.push(push_of(client, ids, -1.0))
    servers.control.persist()
    assert len(list(tmp_path.glob("0/recovery/ps-*"))) == 6  # all, and changes: those of the servers before are removed
    servers.move(1)
    for _ in range(2):
        client.push(push_of(client, ids, -1.0))
        servers.control.persist()
    assert len(list(tmp_path.glob("0/recovery/ps-*"))) == 2  # so are those of the servers that have left


def test_a_master_that_follows_restores_what_has_not_moved_yet(start):
    servers = start(2)
    client = servers.client(1)
    client.pull()
    client.push(push_of(client, np.arange(IDS, dtype=np.int64), -1.0))
    pause = Pause(servers.control, is_up=lambda worker: True)
    pause.begin()
    assert end_pause(servers.control) == []  # the map did not change
    client.push(push_of(client, np.arange(IDS, dtype=np.int64), -1.0))
    pause.begin()
    servers._start(3)
    addresses, shard_map = [s.address for s in servers.servers], servers.control.servers.shard_map.resized(3)
    servers.control.follow(places_at(addresses, servers.ids, shard_map))
    assert end_pause(servers.control) == [0, 1, 2]
    restored = [servers.control.restore(i, addresses[i], i + 1, 0, lambda: None, 0, None) for i in range(3)]
    assert [each.version for each in restored] == [2, 2, 2]
    assert end_pause(servers.control) == []
