"""The whole state of a model goes into and out of any number of servers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from deep_cases import deep_but
from elasticcb.errors import ElasticCBError
from elasticcb.optimizers.state import ModelState, OptimizerState, to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.flat_blocks import unpack_weights
from elasticcb.sharding.partition import VariableSpec, pack
from elasticcb.sharding.push import Movement
from helpers_ps import CUT, assert_same, initial_values, movements

MIXED = (
    VariableSpec("embedding/embeddings", (700, 64), "float32", True),
    VariableSpec("dense/kernel", (64, 300), "bfloat16", True),
    VariableSpec("dense/bias", (300,), "float32", True),
    VariableSpec("scale/scale", (), "float64", True),
    VariableSpec("half/kernel", (8, 8), "float16", True),
    VariableSpec("norm/count", (), "int64", False),
    VariableSpec("norm/moving_mean", (300,), "float32", False),
)


def adam():
    return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)


def momentum():
    return keras.optimizers.SGD(0.01, momentum=0.9)


@pytest.fixture
def clients(start_servers):
    """Starts servers; gives the master's client, and one of a worker."""

    def start(num_ps, specs=MIXED, make_optimizer=adam, **options):
        cluster = start_servers(num_ps, specs, make_optimizer, **options)
        return cluster.client(0), cluster.client(1)

    return start


def push(client, number, slots=None):
    """A worker's movement, with what its optimizers hold: slots like the variables, unless others are given."""
    client.pull()
    specs, parts = client.servers.specs, client.servers.partition
    moved = movements(number, specs)
    held = OptimizerState(
        {(index, "momentums"): array for index, array in moved.items()} if slots is None else slots,
        {(2, "r"): np.full(7, number, np.float32)} if len(specs) > 3 else {},
        {"iterations": np.int64(number + 1)},
    )
    nothing = [{} for _ in parts]
    blocks = [pack(moved, specs, slices, True) for slices in parts]
    return client.push(Movement(1, parts, blocks, nothing, nothing, optimizers=to_tensors(held)), client.versions)


def weights(client):
    return unpack_weights(client.pull(), client.servers.specs, client.servers.partition)


def assert_equal_states(one, other):
    assert one.optimizers == other.optimizers
    for mine, theirs in ((one.slots, other.slots), (one.extras, other.extras), (one.shared, other.shared)):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert value.dtype == theirs[key].dtype
            np.testing.assert_array_equal(value, theirs[key], err_msg=str(key))


@pytest.mark.parametrize("num_ps", deep_but([1, 3], 3))
def test_a_job_goes_on_with_the_exported_state_on_other_servers(clients, num_ps):
    master, worker = clients(2)
    master.initialize(ModelState(initial_values(MIXED), version=40))
    norms = {(0, "norms"): np.arange(2100, dtype=np.float32).reshape(700, 3)}  # of rows
    for step in range(3):
        push(worker, step, norms if step else None)
    state = master.export()
    assert state.version == 43
    assert int(state.optimizer.shared["iterations"]) == 3
    assert state.optimizer.optimizers == ("Adam",)
    assert state.optimizer.slots[0, "momentums"].shape == (700, 64)
    np.testing.assert_array_equal(state.optimizer.slots[0, "norms"], norms[0, "norms"])
    np.testing.assert_array_equal(state.optimizer.extras[2, "r"], np.full(7, 2.0))
    for mine, other in zip(state.weights, weights(worker), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)

    other_master, other_worker = clients(num_ps)
    other_master.initialize(ModelState(state.weights, optimizer=state.optimizer, version=state.version))
    again = other_master.export()
    assert again.version == 43
    assert_equal_states(again.optimizer, state.optimizer)
    for client in (worker, other_worker):
        push(client, 3)
    assert other_worker.version == worker.version == 44
    assert_same(weights(other_worker), weights(worker))


def test_slots_that_have_not_reached_all_servers_are_left_out(clients):
    master, worker = clients(2, CUT, momentum)
    master.initialize(ModelState(initial_values(CUT)))
    slot = OptimizerState(slots={(0, "momentums"): np.ones(CUT[0].shape, np.float32)})
    first = master.servers.known[0]
    tensors = ModelState(optimizer=slot).part(CUT, master.servers.partition[0], master.servers.shard_map, 0)
    master.servers.send(first, Frame(pb.LoadStateRequest(), tensors), "LoadState")
    assert not master.export().optimizer.slots
    push(worker, 0)
    assert set(master.export().optimizer.slots) == {(0, "momentums"), (1, "momentums")}


def test_weights_or_some_of_the_optimizers_state_are_set_at_one_version_while_the_rest_stays(clients):
    master, worker = clients(2, CUT, momentum)
    master.initialize(ModelState(initial_values(CUT)))
    push(worker, 0)
    before = master.export()
    assert master.load_state(initial_values(CUT, seed=1), None) == 2
    after = master.export()
    assert_equal_states(after.optimizer, before.optimizer)
    assert_same(weights(worker), initial_values(CUT, seed=1))
    ones = np.ones(CUT[0].shape, np.float32)
    assert master.load_state(None, OptimizerState(slots={(0, "momentums"): ones})) == 3
    again = master.export()
    np.testing.assert_array_equal(again.optimizer.slots[0, "momentums"], ones)
    np.testing.assert_array_equal(again.optimizer.slots[1, "momentums"], before.optimizer.slots[1, "momentums"])
    assert_same(again.weights, after.weights)
    worker.pull()
    assert {server.version for server in worker.servers.known} == {3}
    assert push(worker, 1).version == 4


WRONG_STATES = [
    (OptimizerState(slots={(0, "momentums"): np.ones((300, 8), np.float32)}), r"\[150, 8\]"),
    (OptimizerState(shared={"iterations": np.ones(2, np.int64)}), "iterations"),
    (OptimizerState(optimizers=("Lion",)), "Lion does not fit .* SGD"),
]


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(clients):
    master, worker = clients(2, CUT, momentum)
    master.initialize(ModelState(initial_values(CUT)))
    push(worker, 0)
    before = master.export()
    for state, message in WRONG_STATES:
        with pytest.raises(ElasticCBError, match=message):
            master.load_state(initial_values(CUT, seed=1), state)
    after = master.export()
    assert after.version == before.version == 1
    assert_equal_states(after.optimizer, before.optimizer)


def test_a_repeated_change_of_state_makes_one_version(clients):
    master, _ = clients(2, CUT, momentum)
    master.initialize(ModelState(initial_values(CUT)))
    first, second = master.servers.known
    master.load_state(initial_values(CUT, seed=1), None)
    master.servers.send(second, Frame(pb.LoadStateRequest(call=5), {}), "LoadState")
    for _ in range(2):
        answer = master.servers.send(first, Frame(pb.LoadStateRequest(call=5), {}), "LoadState")
        assert answer.header.version == 2


def test_a_snapshot_may_hold_other_weights_than_the_servers(clients):
    master, worker = clients(2, CUT)
    master.initialize(ModelState(initial_values(CUT)))
    push(worker, 0)
    assert master.snapshot(1) == 1
    assert master.snapshot(1, initial_values(CUT, seed=2)) == 1
    found = unpack_weights(worker.pull_snapshot(1), CUT, worker.servers.partition)
    assert_same(found, initial_values(CUT, seed=2))
    assert not np.array_equal(weights(worker)[0], found[0])
