from __future__ import annotations

import pytest

from elasticcb.ps.update_policy import AtOnce, PushName, Rounds


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def come(policy, worker, sequence):
    """What is merged when this movement comes."""
    policy.come(PushName(worker, sequence))
    return policy.due(())


def test_without_rounds_each_movement_is_merged_when_it_comes_by_its_share_of_the_workers():
    policy = AtOnce()
    shares = []
    for sequence in (1, 2):
        for worker in (1, 2, 3):
            assert come(policy, worker, sequence) == [PushName(worker, sequence)]
            shares.append(policy.workers)
    assert shares == [1, 2, 3, 3, 3, 3]
    policy.rest(3)
    assert policy.workers == 3  # at once
    for sequence in range(3, 16):  # nothing comes from the others any more
        come(policy, 1, sequence)
    assert policy.workers == 1


@pytest.fixture
def rounds():
    """Between workers 1 and 2, who have taken part in one that has just ended, after 10 seconds."""
    clock = Clock()
    policy = Rounds(clock)
    clock.now = 10.0
    assert come(policy, 1, 1) == [PushName(1, 1)]  # nobody else is known
    assert come(policy, 2, 1) == []
    assert come(policy, 1, 2) == [PushName(2, 1), PushName(1, 2)]
    assert policy.workers == 1
    return policy, clock


def test_a_round_waits_for_all_workers_of_the_round_before(rounds):
    policy, clock = rounds
    clock.now = 14.0
    assert come(policy, 2, 2) == []
    assert come(policy, 1, 3) == [PushName(2, 2), PushName(1, 3)]
    assert policy.waiting == []


def test_a_round_waits_for_as_long_as_its_first_worker_usually_takes(rounds):
    policy, clock = rounds
    for sequence in (3, 4, 5):  # rounds of 4 seconds
        clock.now += 4.0
        come(policy, 2, sequence)
        come(policy, 1, sequence)
    clock.now += 600.0  # an evaluation
    assert come(policy, 2, 6) == []
    clock.now += 3.9
    assert policy.due(()) == []
    assert 0 < policy.patience <= 0.1
    clock.now += 0.1
    assert policy.due(()) == [PushName(2, 6)]
    assert come(policy, 2, 7) == [PushName(2, 7)]  # worker 1 is waited for no more
    assert come(policy, 1, 6) == []  # until it comes again


@pytest.mark.parametrize("ends", [lambda policy: policy.due({1}), lambda policy: policy.rest(1) or policy.due(())])
def test_a_round_waits_for_no_worker_that_is_lost_or_rests(rounds, ends):
    policy, clock = rounds
    clock.now = 14.0
    assert come(policy, 2, 2) == []
    assert ends(policy) == [PushName(2, 2)]


def test_rounds_of_all_workers_wait_however_long_it_takes():
    clock = Clock()
    policy = Rounds(clock, waits_for_all=True)
    for worker in (1, 2):
        policy.join(worker)
    assert come(policy, 2, 1) == []
    clock.now = 3600.0
    assert policy.due(()) == []
    assert policy.patience > 0
    assert come(policy, 1, 1) == [PushName(2, 1), PushName(1, 1)]
    assert come(policy, 1, 2) == []
    assert policy.flush() == [PushName(1, 2)]


def test_a_round_waits_for_those_that_a_worker_joins_unless_they_rest_in_the_same_epoch():
    rounds = Rounds(lambda: 0.0, waits_for_all=True)
    rounds.rest(2, 0)
    rounds.rest(3, 1)
    rounds.join(1, 1, peers=(1, 2, 3))
    rounds.rest(2, 0)  # sent before it was joined
    rounds.come(PushName(1, 1))
    assert rounds.due(()) == []
    rounds.come(PushName(2, 1))
    assert rounds.due(()) == [PushName(1, 1), PushName(2, 1)]
    rounds.rest(2, 1)
    rounds.come(PushName(1, 2))
    assert rounds.due(()) == [PushName(1, 2)]
