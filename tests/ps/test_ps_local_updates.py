"""What servers make of how far workers have moved the weights by themselves."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from waiting import wait_until

from elasticcb.errors import ElasticCBError, ModelFileError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.update_policy import Rounds
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.partition import VariableSpec
from helpers_ps import SPECS, TRAINABLE, initial_values

FIRST = initial_values()


def momentum():
    return keras.optimizers.SGD(0.5, momentum=0.9)


@pytest.fixture
def one(start_servers):
    made = start_servers(make_optimizer=momentum, updates="local")
    made.initialize(FIRST)
    return made


def moved_by(value):
    return {index: np.full(SPECS[index].shape, value, "float32") for index in TRAINABLE}


def merge(one, value, batches, base, worker=1, sequence=1, tensors=None, known=None, **header):
    """A worker has moved all weights by `value`, in so many batches, from those of version `base`."""
    known = base if known is None else known
    more = {"worker_id": worker, "sequence": sequence, "batches": batches, "base": base, "known_version": known}
    frame = one.frame(moved_by(value), **{**more, **header})
    frame.tensors.update(tensors or {})
    return one.call(0, "Exchange", frame)


def join(one, *workers):
    for worker in workers:
        one.push({}, worker_id=worker, joins=True)


def test_a_movement_counts_by_its_share_in_the_batches_since_it_began(one):
    answer = merge(one, 1.0, batches=4, base=0, pull=True)
    assert (answer.header.version, answer.header.alone) == (4, True)
    assert not answer.tensors  # the worker knows what came of it
    answer = merge(one, 1.0, batches=4, base=0, worker=2, pull=True)  # the other's batches are as many
    assert (answer.header.version, answer.header.alone) == (8, False)
    np.testing.assert_allclose(answer.tensors["weights/float32"][:48], FIRST[0].reshape(-1) + 1.5, rtol=1e-5)
    join(one, 2)
    one.push({}, worker_id=2, rests=True)
    merge(one, 1.0, batches=2, base=4, sequence=2)  # of 6
    np.testing.assert_allclose(one.values()[2], FIRST[2] + 1.5 + 1 / 3, rtol=1e-5)


def test_workers_of_a_round_are_answered_with_the_mean_by_batches_when_the_last_one_comes(one, pool, monkeypatch):
    monkeypatch.setattr(Rounds, "LEAST_SECONDS", 60.0)
    join(one, 1, 2)
    waiting = pool.submit(merge, one, 1.0, 6, 0, worker=2, pull=True)
    again = pool.submit(merge, one, 1.0, 6, 0, worker=2, pull=True)  # as when its answer was lost
    policy = one.servers[0]._servicer.holder.model.policy
    wait_until(lambda: policy.waiting)
    assert not waiting.done()
    assert one.push({}).header.version == 0
    last = merge(one, 4.0, batches=2, base=0, pull=True)
    answers = [last, waiting.result(5), again.result(5)]
    assert [answer.header.version for answer in answers] == [8, 8, 8]
    assert {answer.header.status for answer in answers} == {pb.DONE}
    for answer in answers:
        expected = FIRST[0].reshape(-1) + (6 * 1.0 + 2 * 4.0) / 8
        np.testing.assert_allclose(answer.tensors["weights/float32"][:48], expected, rtol=1e-5)


@pytest.mark.parametrize("how", ["rests", "is lost"])
def test_a_worker_that_has_nothing_to_train_frees_its_round(start_servers, pool, how):
    lost = set()
    one = start_servers(make_optimizer=momentum, updates="sync", lost_workers=lost)
    one.initialize(FIRST)
    join(one, 1, 2)
    policy = one.servers[0]._servicer.holder.model.policy
    waiting = pool.submit(merge, one, 1.0, 1, 0)
    wait_until(lambda: policy.waiting)
    assert not waiting.done()
    if how == "rests":
        one.push({}, worker_id=2, rests=True)
    else:
        lost.add(2)
    assert waiting.result(5).header.version == 1
    np.testing.assert_allclose(one.values()[2], FIRST[2] + 1, rtol=1e-5)
    if how == "is lost":
        with pytest.raises(ElasticCBError, match=r"worker 2 .*lost"):
            merge(one, 1.0, 1, 1, worker=2)


def test_forty_workers_make_rounds_together(start_servers):
    workers, rounds = 40, 3
    one = start_servers(make_optimizer=momentum, updates="sync", num_workers=workers)
    one.initialize(FIRST)
    join(one, *range(1, workers + 1))
    connections = [one.connection(0) for _ in range(workers)]
    answers = []

    def work(worker):
        for sequence in range(1, rounds + 1):
            frame = one.frame(moved_by(float(worker)), worker_id=worker, sequence=sequence)
            answers.append(one.call(0, "Exchange", frame, connections[worker - 1]).header.version)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(1, workers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == sorted(workers * [40, 80, 120])
    np.testing.assert_allclose(one.values()[2], FIRST[2] + rounds * 20.5, rtol=1e-4)


def test_a_worker_that_has_pulled_nothing_from_this_server_is_told_all(one):
    slots = {f"slots/{index}/momentum": array for index, array in moved_by(2.0).items()}
    answer = merge(one, 1.0, 4, 0, known=-1, pull=True, optimizers=True, tensors=slots)
    assert {"weights/float32", "state/float32", "slots/1/momentum", "shared/learning_rate"} <= answer.tensors.keys()


def test_optimizers_are_merged_and_count_the_batches_of_all(one):
    slots = {f"slots/{index}/momentum": array for index, array in moved_by(2.0).items()}
    merge(one, 1.0, 4, 0, tensors={**slots, "shared/iterations": np.int64(4)})
    slots = {name: array * 3 for name, array in slots.items()}
    answer = merge(one, 1.0, 4, 0, 2, tensors={**slots, "shared/iterations": np.int64(4)}, optimizers=True)
    np.testing.assert_allclose(answer.tensors["slots/2/momentum"], np.full(6, 4.0))
    assert answer.tensors["shared/iterations"] == 8
    assert answer.tensors["shared/learning_rate"] == 0.5


def test_moving_averages_move_as_far_as_the_batches_of_all_workers_would_move_them(one):
    # 0.9 ** 4 of the old value is left after each.
    for worker in (1, 2):
        tensors = {"state/float32": np.ones(6, "float32"), "shares/float32": np.full(6, 1 - 0.9**4, "float32")}
        merge(one, 0.0, 4, 0, worker, tensors=tensors)
        one.push({}, worker_id=worker, rests=True)
    np.testing.assert_allclose(one.values()[3], 1 + 0.9**8 * (FIRST[3] - 1), rtol=1e-5)


def test_rows_alone_make_no_version(one):
    frame = one.frame({}, worker_id=1, sequence=1, batches=0)
    assert one.call(0, "Exchange", frame).header.version == 0


def test_a_movement_says_how_far_all_variables_have_moved(one):
    frame = one.frame(moved_by(1.0), sequence=1)
    frame.tensors["moved/float32"] = frame.tensors["moved/float32"][:24]
    with pytest.raises(WireError, match=r"float32\[78\].*float32\[24\]"):
        one.call(0, "Exchange", frame)
    frame.tensors["momentum/float32"] = np.zeros(2, np.float32)
    with pytest.raises(WireError, match="momentum/float32"):
        one.call(0, "Exchange", frame)
    with pytest.raises(WireError, match="needs a sequence number"):
        merge(one, 1.0, 1, 0, sequence=0)
    assert one.push({}).header.version == 0


class Rounded(keras.constraints.Constraint):
    """A user's own, that is not registered."""

    def __call__(self, w):
        return keras.ops.round(w)


def shifted(w):
    return w + 1.0


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [(keras.constraints.NonNeg(), 0.0), (Rounded(), -2.0), (shifted, -0.5), (lambda w: w * 2, -3.0)],
    ids=["NonNeg", "unregistered class", "function", "lambda"],
)
def test_a_constraint_holds_of_what_several_workers_make(start_servers, constraint, expected, monkeypatch):
    # Found like this, classes and functions need not be registered.
    for found in (Rounded, shifted):
        monkeypatch.setitem(keras.saving.get_custom_objects(), found.__name__, found)
    written = json.dumps(keras.saving.serialize_keras_object(constraint))
    one = start_servers(specs=[VariableSpec("bias", (6,), "float32", True, constraint=written)], updates="sync")
    one.initialize([np.zeros(6, "float32")])
    join(one, 1, 2)
    with ThreadPoolExecutor() as pool:
        for worker, value in ((1, 1.0), (2, -4.0)):
            moved = {0: np.full(6, value, "float32")}
            pool.submit(one.call, 0, "Exchange", one.frame(moved, worker_id=worker, sequence=1, base=0))
    np.testing.assert_array_equal(one.values()[0], np.full(6, expected))


def test_a_constraint_that_can_not_be_made_on_a_server_is_an_error_that_says_what_to_do(start_servers):
    nowhere = '{"class_name": "Nowhere", "config": {}, "module": "nowhere"}'
    one = start_servers(specs=[VariableSpec("bias", (6,), "float32", True, constraint=nowhere)])
    with pytest.raises(ModelFileError, match=r"constraint of 'bias' can't be created .* Register"):
        one.initialize([np.zeros(6, "float32")])


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 64}, {"use_ema": True, "ema_overwrite_frequency": 64}]
)
def test_what_is_done_every_so_many_steps_is_done_by_each_worker(start_servers, options):
    cluster = start_servers(make_optimizer=lambda: keras.optimizers.SGD(0.5, **options), updates="sync")
    cluster.initialize(FIRST)
    join(cluster, 1, 2, 3, 4)
    found, counted = 0, []
    with ThreadPoolExecutor(4) as pool:
        for turn in range(1, 9):

            def work(worker, turn=turn, before=found):
                tensors = {"shared/iterations": np.int64(before + 16)}
                base = 64 * (turn - 1)
                return merge(cluster, 0.0, 16, base, worker, turn, tensors, optimizers=True, known=-1)

            answers = list(pool.map(work, (1, 2, 3, 4)))
            found = int(answers[0].tensors["shared/iterations"])
            counted.append(found)
    assert [count % 64 for count in counted] == [16, 32, 48, 0] * 2  # else none comes to its 64th step
    assert counted[-1] == 4 * 16 * 8


def test_the_base_learning_rate_is_the_masters(one):
    one.call(0, "SetLearningRate", Frame(pb.SetLearningRateRequest(learning_rate=0.25), {}))
    answer = merge(one, 1.0, 1, 0, tensors={"shared/learning_rate": np.float32(7)}, known=-1, pull=True)
    assert (answer.header.learning_rate, answer.header.base_learning_rate_version) == (0.25, 1)
    assert answer.tensors["shared/learning_rate"] == 0.25


def test_a_learning_rate_that_a_schedule_decides_on_is_not_set(start_servers):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.9)
    one = start_servers(make_optimizer=lambda: keras.optimizers.Adam(schedule))
    one.initialize(FIRST)
    with pytest.raises(ElasticCBError, match="the optimizer Adam has a schedule"):
        one.call(0, "SetLearningRate", Frame(pb.SetLearningRateRequest(learning_rate=0.25), {}))


def test_a_server_without_a_model_or_training_says_so(start_servers):
    serving = start_servers(make_optimizer=None)
    serving.initialize(FIRST)
    with pytest.raises(ElasticCBError, match="accepts no updates, because the job does not train"):
        merge(serving, 1.0, 1, 0)
    with pytest.raises(ElasticCBError, match="has no model yet"):
        start_servers().push({}, pull=True)
