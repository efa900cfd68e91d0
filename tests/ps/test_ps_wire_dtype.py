"""What a worker and its servers have when arrays travel in fewer bits."""

import numpy as np
import pytest

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.array_names import WEIGHTS, of_kind
from helpers_ps_lost import IDS, Servers


@pytest.fixture
def servers(tmp_path):
    made = []

    def make(**settings):
        made.append(Servers(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def weights(blocks):
    return np.concatenate([array for server in blocks for array in of_kind(WEIGHTS, server).values()])


@pytest.mark.parametrize("num_ps", [1, 2])
def test_training_sees_rounded_rows_and_all_else_sees_those_of_the_servers(servers, num_ps):
    some = servers(num_ps=num_ps, wire_dtype="bfloat16")
    some.push(1)
    np.testing.assert_array_equal(weights(some.worker.pull()), weights(some.master.pull()))
    rows = some.master.lookup({3: IDS})[3]
    for_training = some.worker.lookup({3: IDS}, create=True)[3]
    assert (for_training != rows).any()
    assert (np.abs(for_training - rows) <= 0.51 * 1.008 / 127 * np.abs(rows).max(axis=1, keepdims=True)).all()
    np.testing.assert_array_equal(some.worker.lookup({3: IDS})[3], rows)
    some.master.snapshot(1)
    np.testing.assert_array_equal(some.worker.lookup({3: IDS}, evaluation_round=1)[3], rows)


def test_rounded_pushes_train_almost_the_same_model(servers):
    held = {}
    for wire_dtype in ("same", "bfloat16"):
        some = servers(wire_dtype=wire_dtype)
        for step in range(5):
            some.push(step)
        held[wire_dtype] = some.held()
    assert any((one != other).any() for one, other in zip(held["bfloat16"], held["same"], strict=True))
    for one, other in zip(held["bfloat16"], held["same"], strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_worker_that_is_alone_knows_what_servers_made_of_its_rounded_movement(servers, num_ps):
    some = servers(num_ps=num_ps, wire_dtype="bfloat16")
    some.worker.pull()
    for step in range(3):
        some.push(step)
        np.testing.assert_array_equal(weights(some.worker.blocks), weights(some.master.pull()))


def test_a_server_refuses_a_dtype_that_it_does_not_know(servers):
    some = servers()
    request = pb.ExchangeRequest(pull=True, map_version=some.worker.servers.shard_map.version, rows_dtype="int4")
    with pytest.raises(WireError, match="invalid dtype 'int4' for rows"):
        some.worker.servers.send(some.worker.servers.known[0], Frame(request, {}))
