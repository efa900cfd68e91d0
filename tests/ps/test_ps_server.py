"""Real servers on free ports, called over gRPC."""

from __future__ import annotations

import numpy as np
import pytest

from elasticcb.errors import ElasticCBError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_state import TableSpec
from helpers_ps import CUT, SPECS, Part, assert_same, initial_values, movements, push_frame, sgd


@pytest.fixture
def cluster(start_servers):
    """Starts servers with a model."""

    def start(**options):
        started = start_servers(**options)
        started.initialize(initial_values(started.specs))
        return started

    return start


def test_a_push_and_a_pull_travel_in_one_exchange(cluster):
    one = cluster()
    answer = one.push(movements(0), sequence=1, pull=True)
    assert answer.header.status == pb.DONE
    assert (answer.header.version, answer.header.state_version) == (1, 0)
    expected = Part(sgd, initial_values())
    expected.push(movements(0))
    np.testing.assert_array_equal(answer.tensors["weights/float32"], expected.parameters.snapshot().weights["float32"])
    again = one.push({}, pull=True, known_version=1, known_state_version=0)
    assert not again.tensors


def test_a_retried_push_is_merged_once(cluster):
    one = cluster()
    first = one.push(movements(0), sequence=1, pull=True)
    again = one.push(movements(0), sequence=1, pull=True)
    assert again.header == first.header
    assert np.array_equal(again.tensors["weights/float32"], first.tensors["weights/float32"])
    assert one.push(movements(0), sequence=1, worker_id=2).header.version == 2


TABLE = VariableSpec("rows/embeddings", (12, 4), "float32", True, table=TableSpec(12, '"zeros"', 1).to_json())
ONE_ROW = np.ones((1, 4), np.float32)


WRONG_ROWS = [
    ({5: ([12], ONE_ROW)}, r"Row id 12 of 'rows/embeddings' is out of range"),
    ({5: ([-1], ONE_ROW)}, r"Row id -1 of"),
    ({5: ([1], np.ones((1, 3), np.float32))}, r"expected float32\[1, 4\], got float32\[1, 3\]"),
    ({5: ([1], ONE_ROW.astype(np.float64))}, r"got float64\[1, 4\]"),
    ({5: ([[1]], ONE_ROW)}, r"expected int64\[n\], got int64\[1, 1\]"),
    ({5: ([1, 1], np.ones((2, 4), np.float32))}, r"Row id 1 .* is repeated"),
    ({3: ([1], ONE_ROW)}, r"has rows of variable 3"),
    ({9: ([1], ONE_ROW)}, r"has rows of variable 9"),
]


def test_rows_that_do_not_fit_are_refused_and_nothing_is_applied(start_servers):
    one = start_servers(specs=(*SPECS, TABLE))
    one.initialize([*initial_values(), np.zeros((0, 4), np.float32)])
    before = one.values()
    for rows, message in WRONG_ROWS:
        with pytest.raises(WireError, match=message):
            one.push(movements(0), rows=rows, sequence=1)
    assert one.push({}, pull=True).header.version == 0
    assert_same(one.values(), before)


def test_state_is_what_a_step_on_the_present_values_came_to(cluster):
    one = cluster()
    state = {"float32": np.full(6, 0.5, np.float32), "int64": np.array([2])}
    answer = one.push(movements(0), sequence=1, state=state, base=0)
    assert answer.header.state_version == 1
    unchanged = one.push(movements(1), sequence=2, base=1)
    assert unchanged.header.state_version == 1
    np.testing.assert_array_equal(one.values()[3], np.full(6, 0.5))
    assert one.values()[4] == 2


def test_steps_that_began_with_the_same_state_count_as_one_of_their_mean(cluster):
    one = cluster()
    for sequence, value in enumerate([1.0, 3.0, 8.0], 1):
        state = {"float32": np.full(6, value, np.float32), "int64": np.array([int(value)])}
        one.push(movements(sequence), sequence=sequence, state=state, base=0)
    np.testing.assert_allclose(one.values()[3], np.full(6, 4.0), rtol=1e-6)
    assert one.values()[4] == 8  # no mean of integers


def test_state_that_a_step_leaves_stays_as_another_has_set_it(cluster):
    one = cluster()
    one.push(movements(0), sequence=1, state={"float32": np.full(6, 5.0, np.float32)}, base=0)
    state = {"float32": np.full(6, 7.0, np.float32)}
    frame = push_frame(movements(1), one.slices[0], sequence=2, state=state, base=0)
    frame.tensors["shares/float32"][:5] = 0
    one.call(0, "Exchange", frame)
    np.testing.assert_allclose(one.values()[3], [5, 5, 5, 5, 5, 6], rtol=1e-6)
    assert one.values()[4] == initial_values()[4]  # of another dtype
    del frame.tensors["shares/float32"]
    frame.header.sequence = 3
    with pytest.raises(WireError, match=r"of dtype float32 change are nothing.*float32\[6\]"):
        one.call(0, "Exchange", frame)


def test_a_snapshot_is_pulled_until_it_is_released(cluster):
    one = cluster()
    before = one.values()
    one.call(0, "Snapshot", Frame(pb.SnapshotRequest(evaluation_round=1), {}))
    one.push(movements(0), sequence=1)
    again = one.call(0, "Snapshot", Frame(pb.SnapshotRequest(evaluation_round=1), {}))
    assert again.header.version == 0
    for mine, other in zip(one.values(snapshot=1), before, strict=True):
        assert np.array_equal(mine, other)
    one.call(0, "Snapshot", Frame(pb.SnapshotRequest(evaluation_round=1, release=True), {}))
    with pytest.raises(ElasticCBError, match="no snapshot of evaluation pass 1"):
        one.values(snapshot=1)


def test_the_last_movement_is_merged_when_training_finishes(cluster, pool):
    one = cluster(updates="sync")
    before = one.values()
    for worker in (1, 2):
        one.push({}, worker_id=worker, joins=True)
    waiting = pool.submit(one.push, movements(0), sequence=1)
    while one.call(0, "FinishTraining", Frame(pb.FinishTrainingRequest(), {})).header.version < 1:
        pass  # until it has come
    assert waiting.result(5).header.version == 1
    np.testing.assert_allclose(one.values()[2], before[2] + movements(0)[2], rtol=1e-5)


def test_a_checkpoint_at_what_is_no_path_is_refused(cluster):
    with pytest.raises(WireError, match="invalid path"):
        cluster(specs=CUT).call(0, "Save", Frame(pb.SaveRequest(path="a\0b"), {}))


def test_every_method_of_the_proto_has_an_answer(cluster):
    own = {"RefusedCalls"}  # of the process, whichever model it serves
    assert {*cluster().servers[0]._servicer.handlers, *own} == set(PS_METHODS)
