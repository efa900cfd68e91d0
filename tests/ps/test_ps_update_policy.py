from __future__ import annotations

import pytest

from elasticcb.ps.update_policy import Action, Answered, Asynchronous, PushName, Rounds, Synchronous


def test_every_asynchronous_push_is_an_update():
    policy = Asynchronous()
    decision = policy.decide(PushName(1, 1), version=0, present=90)
    assert decision.action is Action.APPLY
    assert decision.pushes == (PushName(1, 1),)


def test_a_synchronous_update_waits_for_its_gradients():
    policy = Synchronous(grads_to_wait=2)
    first = policy.decide(PushName(1, 1), 0, 0)
    assert first.action is Action.WAIT
    assert first.reason == "1 of 2 gradients of the next update"
    assert policy.decide(PushName(2, 7), 0, 0).pushes == (PushName(1, 1), PushName(2, 7))
    assert policy.waiting == ()


def test_a_gradient_that_is_too_old_is_refused_with_both_versions_in_the_reason():
    policy = Synchronous(grads_to_wait=1, version_tolerance=1)
    assert policy.decide(PushName(1, 1), 4, 5).action is Action.APPLY
    refused = policy.decide(PushName(1, 2), 3, 5)
    assert refused.action is Action.STALE
    assert "version 3" in refused.reason
    assert "version 5" in refused.reason


def test_a_gradient_from_the_future_is_refused():
    policy = Synchronous()
    assert policy.decide(PushName(1, 1), 9, 5).action is Action.STALE


def test_flushing_makes_an_update_of_what_waits():
    policy = Synchronous(grads_to_wait=3)
    policy.decide(PushName(1, 1), 0, 0)
    assert policy.flush().pushes == (PushName(1, 1),)
    assert policy.flush().pushes == ()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def rounds():
    """Between workers 1 and 2, who have taken part in one that has just ended, after 10 seconds."""
    clock = Clock()
    policy = Rounds(clock)
    clock.now = 10.0
    assert policy.decide(PushName(1, 1), 0, 0).pushes == (PushName(1, 1),)  # nobody else is known
    assert policy.decide(PushName(2, 1), 0, 0).action is Action.WAIT
    assert policy.decide(PushName(1, 2), 0, 0).pushes == (PushName(2, 1), PushName(1, 2))
    return policy, clock


def test_a_round_waits_for_all_workers_of_the_round_before(rounds):
    policy, clock = rounds
    clock.now = 14.0
    waits = policy.decide(PushName(2, 2), 0, 0)
    assert (waits.action, waits.reason) == (Action.WAIT, "1 more workers are expected")
    assert policy.decide(PushName(1, 3), 0, 0).pushes == (PushName(2, 2), PushName(1, 3))
    assert policy.waiting == ()


def test_a_round_waits_for_as_long_as_its_first_worker_usually_takes(rounds):
    policy, clock = rounds
    for sequence in (3, 4, 5):  # rounds of 4 seconds
        clock.now += 4.0
        policy.decide(PushName(2, sequence), 0, 0)
        policy.decide(PushName(1, sequence), 0, 0)
    clock.now += 600.0  # an evaluation
    policy.decide(PushName(2, 6), 0, 0)
    clock.now += 3.9
    assert policy.due(()) is None
    clock.now += 0.1
    assert policy.due(()).pushes == (PushName(2, 6),)
    assert policy.decide(PushName(2, 7), 0, 0).action is Action.APPLY  # worker 1 is waited for no more
    assert policy.decide(PushName(1, 6), 0, 0).action is Action.WAIT  # until it comes again


def test_a_round_waits_for_no_worker_that_is_lost(rounds):
    policy, clock = rounds
    clock.now = 14.0
    policy.decide(PushName(2, 2), 0, 0)
    assert policy.due({1}).pushes == (PushName(2, 2),)


def test_gradients_that_are_no_use_any_more_do_not_wait():
    policy = Synchronous(grads_to_wait=3)
    for worker in (1, 2):
        policy.decide(PushName(worker, 1), 0, 0)
    policy.keep({PushName(2, 1)})
    assert policy.waiting == (PushName(2, 1),)


def test_answers_are_kept_for_retries_and_dropped_in_the_end():
    answered: Answered[str] = Answered(keep=2)
    for sequence in (1, 2, 3):
        answered.remember(PushName(1, sequence), f"answer {sequence}")
    assert answered.find(PushName(1, 3)) == "answer 3"
    assert answered.find(PushName(2, 3)) is None
    assert answered.find(PushName(1, 1)) is None
    assert answered.forgotten(PushName(1, 1))
    assert not answered.forgotten(PushName(1, 4))
