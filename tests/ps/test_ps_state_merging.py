"""Non-trainable variables that several workers change side by side."""

import numpy as np
import pytest

from elasticcb.sharding.flat_blocks import moved_state, state_moves
from elasticcb.sharding.partition import Slice, VariableSpec

SPECS = (VariableSpec("norm/moving_variance", (1,), "float32", False),)
SLICES = [[Slice(0, 0, 1)]]


def run(workers, pull_every, decay, targets, known=True):
    """A moving average on a server, `workers` of which each see one of `targets` in turn."""
    value = np.float32([1])
    own, base = [value] * workers, [0] * workers
    seen = [value]
    for version, target in enumerate(targets):
        worker = version % workers
        new = np.float32(decay) * own[worker] + np.float32(1 - decay) * np.float32([target])
        before = [{"state/float32": own[worker]}]
        towards, shares = state_moves(before, [{"float32": new}], SPECS, SLICES, {0: decay} if known else {})
        if shares[0]:
            value = moved_state(value, towards[0]["float32"], shares[0]["float32"], version - base[worker])
        base[worker] = version + 1
        own[worker] = value if (version // workers + 1) % pull_every == 0 else new
        seen.append(value)
    return np.concatenate(seen)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("decay", [0.99, 0.9, 0.0])
@pytest.mark.parametrize(("workers", "pull_every"), [(1, 1), (1, 32), (8, 1), (8, 32), (30, 3)])
def test_moving_average_stays_within_what_it_averages(workers, pull_every, decay, known):
    targets = np.random.default_rng(0).uniform(2, 9, 3000)
    seen = run(workers, pull_every, decay, targets, known)
    assert seen.min() >= 1
    assert seen.max() <= 9.001
    if known:
        assert abs(seen[-500:].mean() - 5.5) < 0.6


@pytest.mark.parametrize("workers", [4, 16])
def test_all_batches_count_for_statistics_of_known_momentum_however_late_they_are(workers):
    targets = np.random.default_rng(1).uniform(0, 5, 200)
    np.testing.assert_allclose(run(workers, 1, 0.99, targets)[-1:], run(1, 1, 0.99, targets)[-1:], rtol=1e-4)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("pull_every", [1, 32])
def test_moving_average_of_one_worker_is_that_of_keras(pull_every, known):
    targets = np.random.default_rng(1).uniform(0, 5, 200)
    expected = np.float32([1])
    for target in targets:
        expected = np.float32(0.9) * expected + np.float32(1 - 0.9) * np.float32([target])
    np.testing.assert_allclose(run(1, pull_every, 0.9, targets, known)[-1:], expected, rtol=1e-5)


def test_flag_that_two_workers_set_is_set_and_other_elements_stay():
    flags = np.array([False, False, True])
    for _ in range(2):
        flags = moved_state(flags, np.array([True, False, False]), np.float32([1, 0, 0]), 1)
    assert flags.tolist() == [True, False, True]


def test_integer_is_what_was_set_last():
    count = np.array([3, 7])
    for value in (4, 5):
        count = moved_state(count, np.array([value, 0]), np.float32([1, 0]), 2)
    assert count.tolist() == [5, 7]


def test_infinity_that_a_step_leaves_stays():
    best = moved_state(np.float32([np.inf, 2]), np.float32([np.inf, 4]), np.float32([0, 1]), 1)
    assert best.tolist() == [np.inf, 3]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_and_stay_are_no_change(value):
    before = np.float32([value])
    assert state_moves([{"state/float32": before}], [{"float32": before.copy()}], SPECS, SLICES, {}) == ([{}], [{}])
