"""What is said of gradients that come late."""

import keras
import numpy as np
import pytest

from elasticcb.master.late_gradients import LossJumps, risk
from elasticcb.optimizers.traits import kinds_with_momentum


@pytest.mark.parametrize(
    ("optimizer", "kinds"),
    [
        (keras.optimizers.SGD(0.1), []),
        (keras.optimizers.SGD(0.1, momentum=0.9), ["SGD"]),
        (keras.optimizers.Adagrad(), []),
        (keras.optimizers.Adam(), ["Adam"]),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion()), ["Lion"]),
    ],
)
def test_optimizers_with_momentum_are_known(optimizer, kinds):
    assert kinds_with_momentum([optimizer]) == kinds


def test_many_workers_with_momentum_are_told_what_to_do():
    said = risk(4, ["Adam"])
    assert "about 3 updates late" in said
    assert "momentum of Adam" in said
    assert "--updates=local" in said
    assert risk(2, ["Adam"]) == ""
    assert risk(8, []) == ""


def said_of(means, workers=4):
    jumps = LossJumps()
    return [said for said in (jumps.note(mean, 50, workers) for mean in means) if said]


def test_a_loss_that_jumps_is_told_once():
    usual = [1000, 300, 100, 40, 35, 30, 29, 28, 30, 28]
    (said,) = said_of([*usual, 200, 30, 28, 900, 28, 800])
    assert said.startswith("The training loss jumped to 900 from 30, which suggests that the gradients of 4 workers")


def test_a_loss_that_falls_rises_slowly_jumps_once_or_is_not_finite_is_no_sign():
    falling = [1000 * 0.7**step for step in range(60)]
    assert said_of([*falling, *falling[::-1][:10]]) == []
    assert said_of([*[1.0] * 20, 9.0, *[1.0] * 40, 9.0]) == []
    assert said_of([float("nan")] * 40) == []
    assert said_of([0.0] * 40 + [1.0] * 3) == []


def test_single_batches_may_be_far_from_their_mean():
    losses = np.random.default_rng(3).lognormal(0.0, 1.5, 20_000)  # of which some are 100 times the median
    jumps = LossJumps()
    assert not any(jumps.note(loss, 1, 4) for loss in losses)
