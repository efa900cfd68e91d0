"""Real servers on free ports, called over gRPC."""

from __future__ import annotations

import numpy as np
import pytest

from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import begin_version, finish_version
from elasticcb.errors import ElasticCBError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame
from helpers_ps import CUT, Cluster, Part, gradients, initial_values, push_frame, sgd


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
    answer = one.push(gradients(0), sequence=1, pull=True)
    assert answer.header.status == pb.ACCEPTED
    assert (answer.header.version, answer.header.state_version) == (1, 0)
    expected = Part(sgd, initial_values())
    expected.push(gradients(0))
    np.testing.assert_allclose(answer.tensors["weights/float32"], expected.parameters.weights()["float32"], rtol=1e-6)
    again = one.push({}, pull=True, known_version=1, known_state_version=0)
    assert again.header.status == pb.NO_PUSH
    assert not again.tensors


def test_a_retried_push_is_applied_once(cluster):
    one = cluster()
    first = one.push(gradients(0), sequence=1, pull=True)
    again = one.push(gradients(0), sequence=1, pull=True)
    assert again.header == first.header
    assert np.array_equal(again.tensors["weights/float32"], first.tensors["weights/float32"])
    assert one.push(gradients(0), sequence=1, worker_id=2).header.version == 2


def test_a_gradient_with_nan_is_refused_and_its_variable_named(cluster):
    one = cluster()
    before = one.values()
    bad = gradients(0)
    bad[1][2, 3] = np.nan
    answer = one.push(bad, sequence=1)
    assert answer.header.status == pb.NON_FINITE
    assert "'dense/kernel'" in answer.header.reason
    rows = (np.array([1]), np.full((1, 4), np.inf, np.float32))
    answer = one.push({}, rows={0: rows}, sequence=2)
    assert "'embedding/embeddings'" in answer.header.reason
    assert one.push(gradients(0), sequence=3, loss=np.nan).header.reason == "the loss is nan"
    found = one.push(gradients(0), sequence=4, non_finite="the gradient of 'head/bias'")
    assert found.header.reason.startswith("the gradient of 'head/bias' holds NaN or infinity")
    for mine, other in zip(one.values(), before, strict=True):
        assert np.array_equal(mine, other)


def test_a_large_finite_gradient_is_no_infinity(cluster):
    one = cluster()
    large = {2: np.full(6, 1e30, np.float32)}
    assert one.push(large, sequence=1).header.status == pb.ACCEPTED


ONE_ROW = np.ones((1, 4), np.float32)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({0: ([12], ONE_ROW)}, r"Row id 12 of 'embedding/embeddings' is out of range"),
        ({0: ([-1], ONE_ROW)}, r"Row id -1 of"),
        ({0: ([1], np.ones((1, 3), np.float32))}, r"expected float32\[1, 4\], got float32\[1, 3\]"),
        ({0: ([1], ONE_ROW.astype(np.float64))}, r"got float64\[1, 4\]"),
        ({0: ([[1]], ONE_ROW)}, r"expected int64\[n\], got int64\[1, 1\]"),
        ({0: ([1, 1], np.ones((2, 4), np.float32))}, r"Row id 1 .* is repeated"),
        ({3: ([1], ONE_ROW)}, r"has variable 3"),
        ({9: ([1], ONE_ROW)}, r"has variable 9"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_applied(shared_cluster, rows, message):
    dense = {2: gradients(0)[2]}
    with pytest.raises(WireError, match=message):
        shared_cluster.push(dense, rows=rows, sequence=1)
    assert shared_cluster.push({}, pull=True).header.version == 0


@pytest.fixture(scope="module")
def shared_cluster():
    made = Cluster()
    made.initialize(initial_values())
    yield made
    made.close()


def test_dense_gradients_that_do_not_fit_are_refused(shared_cluster):
    frame = push_frame({1: gradients(0)[1]}, shared_cluster.slices[0], sequence=1)
    frame.header.dense_variables.append(2)
    with pytest.raises(WireError, match=r"'dense/kernel', 'dense/bias'.*float32\[30\].*float32\[24\]"):
        shared_cluster.call(0, "Exchange", frame)
    frame.tensors["momentum/float32"] = np.zeros(2, np.float32)
    with pytest.raises(WireError, match="momentum/float32"):
        shared_cluster.call(0, "Exchange", frame)


def test_state_is_what_a_step_on_the_present_values_came_to(cluster):
    one = cluster()
    state = {"float32": np.full(6, 0.5, np.float32), "int64": np.array([2])}
    answer = one.push(gradients(0), sequence=1, state=state, state_base=0)
    assert answer.header.state_version == 1
    unchanged = one.push(gradients(1), sequence=2, state_base=1)
    assert unchanged.header.state_version == 1
    np.testing.assert_array_equal(one.values()[3], np.full(6, 0.5))
    assert one.values()[4] == 2


def test_steps_that_began_with_the_same_state_count_as_one_of_their_mean(cluster):
    one = cluster()
    for sequence, value in enumerate([1.0, 3.0, 8.0], 1):
        state = {"float32": np.full(6, value, np.float32), "int64": np.array([int(value)])}
        one.push(gradients(sequence), sequence=sequence, state=state, state_base=0)
    np.testing.assert_allclose(one.values()[3], np.full(6, 4.0), rtol=1e-6)
    assert one.values()[4] == 8  # no mean of integers


def test_state_that_a_step_leaves_stays_as_another_has_set_it(cluster):
    one = cluster()
    one.push(gradients(0), sequence=1, state={"float32": np.full(6, 5.0, np.float32)}, state_base=0)
    frame = push_frame(
        gradients(1), one.slices[0], sequence=2, state={"float32": np.full(6, 7.0, np.float32)}, state_base=0
    )
    frame.tensors["shares/float32"][:5] = 0
    one.call(0, "Exchange", frame)
    np.testing.assert_allclose(one.values()[3], [5, 5, 5, 5, 5, 6], rtol=1e-6)
    del frame.tensors["shares/float32"]
    frame.header.sequence = 3
    with pytest.raises(WireError, match=r"of dtype float32 change are nothing.*float32\[6\]"):
        one.call(0, "Exchange", frame)


@pytest.mark.parametrize("workers", [1, 2])
def test_changes_of_one_dtype_leave_the_other_as_it_is(cluster, workers):
    one = cluster(use_async=False, grads_to_wait=workers)
    before = one.values()
    for worker in range(1, workers + 1):
        state = {"int64": np.array([7])} if worker == 1 else {"float32": np.ones(6, np.float32)}
        one.push(gradients(0), sequence=1, worker_id=worker, state=state, state_base=0)
    assert one.values()[4] == 7
    np.testing.assert_array_equal(one.values()[3], before[3] if workers == 1 else np.ones(6))


def test_a_snapshot_is_pulled_until_it_is_released(cluster):
    one = cluster()
    before = one.values()
    one.call(0, "Snapshot", Frame(pb.SnapshotRequest(evaluation_round=1), {}))
    one.push(gradients(0), sequence=1)
    again = one.call(0, "Snapshot", Frame(pb.SnapshotRequest(evaluation_round=1), {}))
    assert again.header.version == 0
    for mine, other in zip(one.values(snapshot=1), before, strict=True):
        assert np.array_equal(mine, other)
    one.call(0, "Snapshot", Frame(pb.SnapshotRequest(evaluation_round=1, release=True), {}))
    with pytest.raises(ElasticCBError, match="no snapshot of evaluation pass 1"):
        one.values(snapshot=1)


def test_the_base_learning_rate_is_set_for_all_later_pushes(cluster):
    one = cluster()
    one.call(0, "SetLearningRate", Frame(pb.SetLearningRateRequest(learning_rate=0.25), {}))
    answer = one.push({}, pull=True)
    assert (answer.header.learning_rate, answer.header.base_learning_rate_version) == (0.25, 1)
    before = one.values()[2]
    one.push({2: np.ones(6, np.float32)}, sequence=1)
    np.testing.assert_allclose(one.values()[2], before - 0.25, rtol=1e-5)


def test_a_server_without_a_model_or_an_optimizer_says_so(cluster, start_servers):
    serving = cluster(make_optimizer=None)
    with pytest.raises(ElasticCBError, match="has no optimizer"):
        serving.push(gradients(0), sequence=1)
    with pytest.raises(ElasticCBError, match="has no model yet"):
        start_servers().push({}, pull=True)


def test_a_synchronous_update_is_the_mean_of_its_gradients(cluster):
    one = cluster(use_async=False, grads_to_wait=2)
    before = one.values()
    rows = [([1, 5], np.ones((2, 4), np.float32)), ([5], np.full((1, 4), 3.0, np.float32))]
    ones = {2: np.ones(6, np.float32)}
    states = [{"float32": np.full(6, value, np.float32), "int64": np.array([value])} for value in (1, 2)]
    first = one.push(ones, rows={0: rows[0]}, state=states[0], state_base=0, sequence=1, worker_id=1)
    assert (first.header.status, first.header.version) == (pb.ACCEPTED, 0)
    second = one.push({2: 3 * ones[2]}, rows={0: rows[1]}, state=states[1], state_base=0, sequence=1, worker_id=2)
    assert second.header.version == 1
    after = one.values()
    np.testing.assert_allclose(after[2], before[2] - 0.5 * 2, rtol=1e-5)
    np.testing.assert_allclose(after[0][5], before[0][5] - 0.5 * 2, rtol=1e-5)
    np.testing.assert_allclose(after[0][1], before[0][1] - 0.5 * 0.5, rtol=1e-5)
    np.testing.assert_allclose(after[3], np.full(6, 1.5), rtol=1e-5)
    assert after[4] == 2
    stale = one.push(ones, sequence=2, worker_id=1, version=0)
    assert stale.header.status == pb.STALE


def test_the_last_gradients_are_applied_when_training_finishes(cluster):
    one = cluster(use_async=False, grads_to_wait=3)
    before = one.values()
    one.push({2: np.ones(6, np.float32)}, sequence=1)
    answer = one.call(0, "FinishTraining", Frame(pb.FinishTrainingRequest(finalize=True), {}))
    assert answer.header.version == 1
    np.testing.assert_allclose(one.values()[2], before[2] - 0.5, rtol=1e-5)


def test_all_servers_take_a_synchronous_gradient_or_none_does(cluster):
    two = cluster(num_ps=2, specs=CUT, use_async=False, grads_to_wait=2, sync_version_tolerance=0)
    assert {part.variable for slices in two.slices for part in slices} == {0, 1, 2}
    assert all(any(part.variable == 0 for part in slices) for slices in two.slices)
    before = two.values()

    def push(worker, sequence, version, **header):
        dense = gradients(10 * worker + sequence, CUT)
        arguments = {"worker_id": worker, "sequence": sequence, "version": version, **header}
        staged = two.push(dense, 1, staged=True, **arguments)
        return staged, two.push(dense, 0, **arguments)

    push(1, 1, 0)
    staged, answer = push(2, 1, 0, learning_rate=0.25, has_learning_rate=True)
    assert staged.header.status == answer.header.status == pb.ACCEPTED
    assert answer.header.version == 1
    assert two.push({}, 1, pull=True).header.version == 1
    expected = before[0] - 0.25 * (gradients(11, CUT)[0] + gradients(21, CUT)[0]) / 2
    np.testing.assert_allclose(two.values()[0], expected, rtol=1e-4, atol=1e-5)

    held = two.values()
    _, late = push(1, 2, 0)
    assert late.header.status == pb.STALE
    push(1, 3, 1)
    assert all(np.array_equal(a, b) for a, b in zip(two.values(), held, strict=True))
    for index in (0, 1):
        two.call(index, "FinishTraining", Frame(pb.FinishTrainingRequest(finalize=True), {}))
    np.testing.assert_allclose(two.values()[0], held[0] - 0.5 * gradients(13, CUT)[0], rtol=1e-4, atol=1e-5)
    assert [two.push({}, index, pull=True).header.version for index in (0, 1)] == [2, 2]


def test_an_update_that_one_server_can_not_make_is_followed_by_none(cluster):
    two = cluster(num_ps=2, specs=CUT, use_async=False)
    with pytest.raises(ElasticCBError, match="lacks 1 of 1 pushes"):  # which was never staged
        two.push(gradients(0, CUT), 0, sequence=1)
    two.push(gradients(1, CUT), 1, sequence=2, staged=True)
    with pytest.raises(
        ElasticCBError, match=r"update to version 1 failed on some of the 2 .* from the last checkpoint"
    ):
        two.push(gradients(1, CUT), 0, sequence=2)
    assert two.push({}, 1, pull=True).header.version == 0


def test_a_synchronous_push_that_is_not_staged_is_refused_by_the_second_server(cluster):
    two = cluster(num_ps=2, specs=CUT, use_async=False)
    with pytest.raises(WireError, match="staged=False came to server 1"):
        two.push(gradients(0, CUT), 1, sequence=1)


def test_an_update_of_no_push_is_refused(cluster):
    two = cluster(num_ps=2, specs=CUT, use_async=False)
    with pytest.raises(WireError, match="has no pushes"):
        two.call(1, "Apply", Frame(pb.ApplyRequest(version=1), {}))


def test_a_checkpoint_at_what_is_no_path_is_refused(cluster):
    with pytest.raises(WireError, match="invalid path"):
        cluster(specs=CUT).call(0, "Save", Frame(pb.SaveRequest(directory="a\0b"), {}))


def test_a_checkpoint_of_two_servers_is_served_by_one(cluster, tmp_path):
    two = cluster(num_ps=2, specs=CUT)
    for index in (0, 1):
        two.push(gradients(0, CUT), index, sequence=1)
    folder = begin_version(tmp_path, 1)
    saved = [two.call(index, "Save", Frame(pb.SaveRequest(directory=str(folder)), {})).header for index in (0, 1)]
    files = [SavedFile(answer.file, answer.bytes, answer.sha256) for answer in saved]
    final = finish_version(folder, version=1, specs=CUT, parts=two.slices, files=files)
    one = cluster(specs=CUT)
    one.initialize(folder=final)
    assert one.push({}, pull=True).header.version == 1
    for mine, other in zip(one.values(), two.values(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_every_method_of_the_proto_has_an_answer(shared_cluster):
    own = {"RefusedCalls"}  # of the process, whichever model it serves
    assert {*shared_cluster.servers[0]._servicer.handlers, *own} == set(PS_METHODS)
