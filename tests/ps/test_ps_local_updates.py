"""What servers make of how far workers have moved the weights by themselves."""

import json

import keras
import numpy as np
import pytest

from elasticcb.errors import WireError
from elasticcb.ps.update_policy import Rounds
from elasticcb.sharding.partition import VariableSpec
from helpers_ps import SPECS, TRAINABLE, Cluster, initial_values

FIRST = initial_values()


@pytest.fixture
def one():
    made = Cluster(make_optimizer=lambda: keras.optimizers.SGD(0.5, momentum=0.9), updates="local")
    made.initialize(FIRST)
    yield made
    made.close()


def moved_by(value):
    return {index: np.full(SPECS[index].shape, value, "float32") for index in TRAINABLE}


def merge(one, value, batches, base, worker=1, sequence=1, tensors=None, known=None, **header):
    """A worker has moved all weights by `value`, in so many batches, from those of version `base`."""
    frame = one.frame(
        moved_by(value),
        worker_id=worker,
        sequence=sequence,
        batches=batches,
        state_base=base,
        known_version=base if known is None else known,
        **header,
    )
    frame.tensors.update(tensors or {})
    answer = one.call(0, "Exchange", frame)
    while answer.header.waits:
        answer = ask(one, worker, sequence)
    return answer


def ask(one, worker, sequence):
    """Asks whether a movement waits still."""
    return one.call(0, "Exchange", one.frame({}, worker_id=worker, awaited=sequence, pull=True, optimizers=True))


def test_a_movement_counts_by_its_share_in_the_batches_since_it_began(one):
    answer = merge(one, 1.0, batches=4, base=0, pull=True)
    assert answer.header.version == 4
    assert not answer.tensors  # the worker knows what came of it
    answer = merge(one, 1.0, batches=4, base=0, worker=2, pull=True)  # the other's batches are as many
    assert answer.header.version == 8
    np.testing.assert_allclose(answer.tensors["weights/float32"][:48], FIRST[0].reshape(-1) + 1.5, rtol=1e-5)
    merge(one, 1.0, batches=2, base=4, sequence=2)  # of 6
    np.testing.assert_allclose(one.values()[2], FIRST[2] + 1.5 + 1 / 3, rtol=1e-5)


def test_workers_of_a_round_come_to_the_mean_by_batches(one, monkeypatch):
    merge(one, 0.0, batches=4, base=0)
    monkeypatch.setattr(Rounds, "LEAST_SECONDS", 60.0)
    frame = one.frame(moved_by(1.0), worker_id=2, sequence=1, batches=6, state_base=4, known_version=4, pull=True)
    waits = one.call(0, "Exchange", frame)  # for worker 1
    assert waits.header.waits
    assert not waits.tensors
    again = one.call(0, "Exchange", frame)  # as when its answer was lost
    assert again.header.waits
    answer = merge(one, 4.0, batches=2, base=4, sequence=2, pull=True)
    assert answer.header.version == 12
    np.testing.assert_allclose(one.values()[2], FIRST[2] + (6 * 1.0 + 2 * 4.0) / 8, rtol=1e-5)
    assert ask(one, 2, 1).header.version == 12


def test_a_server_that_knows_nothing_of_a_movement_asks_for_it_again(one):
    assert ask(one, 1, 5).header.unknown


def test_a_worker_that_has_pulled_nothing_from_this_server_is_told_all(one):
    answer = merge(one, 1.0, batches=4, base=0, known=-1, pull=True, optimizers=True)
    assert {"weights/float32", "state/float32", "slots/1/momentums", "shared/iterations"} <= answer.tensors.keys()


def test_a_movement_that_is_sent_again_is_merged_once(one):
    for _ in range(3):
        answer = merge(one, 1.0, batches=4, base=0)
        assert answer.header.version == 4
    np.testing.assert_allclose(one.values()[2], FIRST[2] + 1, rtol=1e-5)


def test_optimizers_are_merged_and_count_the_batches_of_all(one):
    momentum = {f"slots/{index}/momentums": array for index, array in moved_by(2.0).items()}
    merge(one, 1.0, 4, 0, tensors={**momentum, "shared/iterations": np.int64(4)})
    momentum = {name: array * 3 for name, array in momentum.items()}
    answer = merge(one, 1.0, 4, 0, 2, tensors={**momentum, "shared/iterations": np.int64(4)}, optimizers=True)
    np.testing.assert_allclose(answer.tensors["slots/2/momentums"], np.full(6, 4.0))
    assert answer.tensors["shared/iterations"] == 8
    assert answer.tensors["shared/learning_rate"] == 0.5


def test_moving_averages_move_as_far_as_the_batches_of_all_workers_would_move_them(one):
    # 0.9 ** 4 of the old value is left after each.
    for worker in (1, 2):
        tensors = {"state/float32": np.ones(6, "float32"), "shares/float32": np.full(6, 1 - 0.9**4, "float32")}
        merge(one, 0.0, 4, 0, worker, tensors=tensors)
    np.testing.assert_allclose(one.values()[3], 1 + 0.9**8 * (FIRST[3] - 1), rtol=1e-5)


def test_rows_alone_make_no_version(one):
    frame = one.frame({}, worker_id=1, sequence=1, batches=0, state_base=0)
    assert one.call(0, "Exchange", frame).header.version == 0


def test_a_movement_says_how_far_all_variables_have_moved(one):
    frame = one.frame({1: moved_by(1.0)[1]}, worker_id=1, sequence=1, batches=4, state_base=0)
    with pytest.raises(WireError, match="movements of 1 of the 3 variables that this server trains; it must have all"):
        one.call(0, "Exchange", frame)


def test_a_constraint_holds_of_what_several_workers_make():
    constraint = json.dumps(keras.saving.serialize_keras_object(keras.constraints.NonNeg()))
    specs = [VariableSpec("bias", (6,), "float32", True, constraint=constraint)]
    one = Cluster(specs=specs, updates="local")
    try:
        one.initialize([np.zeros(6, "float32")])
        for worker, value in ((1, 1.0), (2, -4.0)):
            moved = {0: np.full(6, value, "float32")}
            frame = one.frame(moved, worker_id=worker, sequence=1, batches=1, state_base=0)
            one.call(0, "Exchange", frame)
        while ask(one, 2, 1).header.waits:
            pass
        np.testing.assert_array_equal(one.values()[0], np.zeros(6))
    finally:
        one.close()


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 64}, {"use_ema": True, "ema_overwrite_frequency": 64}]
)
def test_what_is_done_every_so_many_steps_is_done_by_each_worker(options):
    cluster = Cluster(make_optimizer=lambda: keras.optimizers.SGD(0.5, **options), updates="local")
    cluster.initialize(FIRST)
    found, counted = 0, []
    for turn in range(1, 9):
        for worker in (1, 2, 3, 4):
            tensors = {"shared/iterations": np.int64(found + 16)}
            answer = merge(cluster, 0.0, 16, 64 * (turn - 1), worker, turn, tensors, optimizers=True, known=-1)
        found = int(answer.tensors["shared/iterations"])
        counted.append(found)
    cluster.close()
    assert [count % 64 for count in counted] == [16, 32, 48, 0] * 2  # else none comes to its 64th step
    assert counted[-1] == 4 * 16 * 8
