from __future__ import annotations

import numpy as np
import pytest

from elasticcb.errors import WireError
from elasticcb.master.evaluation import EvaluationRounds, Round, RoundDecision, RoundReason


def started(decision: RoundDecision) -> Round:
    assert decision.round is not None, decision.reason
    return decision.round


def states(*values: float, dtype: str = "float32") -> dict[str, list[np.ndarray]]:
    return {"accuracy": [np.array(value, dtype) for value in values]}


# ---------------------------------------------------------------- when


def test_round_starts_every_so_many_versions():
    rounds = EvaluationRounds(evaluation_steps=10)
    decision = rounds.version_reached(9)
    assert decision.round is None
    assert "due at 10" in decision.reason
    assert started(rounds.version_reached(12)) == Round(1, 12, RoundReason.STEPS)
    rounds.finish(14)
    assert rounds.version_reached(21).round is None
    assert rounds.epoch_ended(0, 21).round is None
    assert started(rounds.version_reached(22)).id == 2
    resumed = EvaluationRounds(evaluation_steps=10, start_version=100)
    assert resumed.version_reached(109).round is None
    assert started(resumed.version_reached(110))


def test_round_starts_at_the_end_of_an_epoch_when_no_steps_are_set():
    rounds = EvaluationRounds()
    assert rounds.version_reached(1000).round is None
    assert started(rounds.epoch_ended(0, 40)) == Round(1, 40, RoundReason.EPOCH_END, epoch=0)


@pytest.mark.parametrize("steps", [0, 7])
def test_there_is_always_a_round_at_the_end_of_training(steps):
    rounds = EvaluationRounds(evaluation_steps=steps)
    assert started(rounds.training_ended(5)) == Round(1, 5, RoundReason.TRAINING_END)
    assert not rounds.all_done
    rounds.finish(5)
    assert rounds.all_done
    assert rounds.version_reached(50).round is None


def test_no_final_round_when_the_last_one_saw_the_same_version():
    rounds = EvaluationRounds()
    rounds.epoch_ended(0, 40)
    assert rounds.training_ended(40).round is None
    assert not rounds.all_done
    assert rounds.finish(40).round is None
    assert rounds.all_done


def test_what_asks_for_a_round_while_one_is_running_becomes_one_round_after_it():
    rounds = EvaluationRounds(evaluation_steps=10)
    started(rounds.version_reached(10))
    for version in (20, 30, 40):
        decision = rounds.version_reached(version)
        assert decision.round is None
        assert "evaluation pass 1 is running" in decision.reason
    assert started(rounds.finish(43)) == Round(2, 43, RoundReason.STEPS)
    assert rounds.finish(44).round is None


def test_round_after_several_reasons_is_named_after_the_weightiest():
    rounds = EvaluationRounds()
    rounds.epoch_ended(0, 10)
    rounds.epoch_ended(1, 20)
    rounds.training_ended(21)
    rounds_next = started(rounds.finish(21))
    assert rounds_next == Round(2, 21, RoundReason.TRAINING_END, epoch=1)
    assert not rounds.all_done
    rounds.finish(21)
    assert rounds.all_done


def test_requested_round_starts_at_any_version():
    rounds = EvaluationRounds()
    assert started(rounds.requested(0)).reason is RoundReason.REQUESTED
    rounds.finish(0)
    assert started(rounds.requested(0)).id == 2


# ---------------------------------------------------------------- what comes out


def requested(**options):
    """A round that was asked for, and its number."""
    rounds = EvaluationRounds(**options)
    return rounds, started(rounds.requested(0)).id


def test_states_are_added_up_in_their_own_shapes_and_dtypes():
    rounds, number = requested()
    for task in range(3):
        rounds.collect(number, task, {"a": [np.full((2, 3), task, "float32"), np.array(task + 1, "int32")]})
    merged = rounds.collection.merged()
    matrix, count = merged.states["a"]
    assert (matrix.dtype, count.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(matrix, np.full((2, 3), 3))
    assert count == 6


def test_task_is_counted_once():
    rounds, number = requested()
    assert rounds.collect(number, 7, states(1))
    assert not rounds.collect(number, 7, states(1))
    assert rounds.collection.merged().states["accuracy"][0] == 1


@pytest.mark.parametrize(
    "merge", [None, lambda name, tasks: [np.sum(each, axis=0) for each in zip(*tasks, strict=True)]]
)
def test_task_after_which_the_pass_starts_again_replaces_earlier_ones(merge):
    rounds = EvaluationRounds(merge=merge)
    number = started(rounds.requested(0)).id
    rounds.collect(number, 1, states(1), [{"y": np.array([1])}])
    rounds.collect(number, 2, states(2), [{"y": np.array([2])}], restarts=True)
    assert not rounds.collect(number, 1, states(1))
    rounds.collect(number, 3, states(4), [{"y": np.array([3])}])
    merged = rounds.collection.merged()
    assert [batch["y"].item() for batch in merged.batches] == [2, 3]
    for name, arrays in states(6).items():
        np.testing.assert_array_equal(merged.states[name], arrays)


def test_states_of_another_round_are_refused():
    rounds = EvaluationRounds()
    first = started(rounds.requested(0)).id
    rounds.finish(0)
    assert not rounds.collect(first, 1, states(1))
    second = started(rounds.requested(0)).id
    assert not rounds.collect(first, 1, states(1))
    assert rounds.collect(second, 1, states(1))


def test_a_new_round_begins_with_nothing():
    rounds = EvaluationRounds()
    for value in (5.0, 7.0):
        rounds.collect(started(rounds.requested(0)).id, 1, states(value))
        assert rounds.collection.merged().states["accuracy"][0] == value
        rounds.finish(0)


def test_sum_does_not_depend_on_the_order_of_tasks():
    values = np.random.default_rng(0).random(2000).astype("float32")

    def total(order) -> float:
        rounds, number = requested()
        for task in order:
            rounds.collect(number, task, {"a": [values[task]]})
        return float(rounds.collection.merged().states["a"][0])

    assert total(range(2000)) == total(reversed(range(2000)))


def test_outputs_stay_batches_in_the_order_of_tasks_whatever_their_shapes():
    rounds, number = requested()
    rounds.collect(number, 5, {}, [{"y": np.array([[4, 5]])}])
    rounds.collect(number, 2, {}, [{"y": np.array([[1], [2]])}, {"y": np.array([[3]])}])
    assert [batch["y"].tolist() for batch in rounds.collection.merged().batches] == [[[1], [2]], [[3]], [[4, 5]]]


def test_own_merge_function_sees_the_states_of_all_tasks_in_the_order_of_tasks():
    def largest(name: str, of_tasks: list[list[np.ndarray]]) -> list[np.ndarray]:
        assert name == "accuracy"
        assert [float(first[0]) for first in of_tasks] == [1, 9, 4]
        return [np.maximum.reduce(arrays) for arrays in zip(*of_tasks, strict=True)]

    rounds, number = requested(merge=largest)
    for task, value in ((3, 4.0), (1, 1.0), (2, 9.0)):
        rounds.collect(number, task, states(value))
    assert rounds.collection.merged().states["accuracy"][0] == 9


@pytest.mark.parametrize(
    ("other", "outputs"),
    [
        (states(1), []),
        ({"loss": [np.zeros(()), np.zeros(())]}, []),
        ({"accuracy": [np.zeros(3), np.zeros(())]}, []),
        ({}, [{"accuracy": np.zeros(3)}]),
    ],
)
def test_metrics_that_differ_between_tasks_are_an_error_and_leave_the_round_as_it_was(other, outputs):
    rounds, number = requested()
    rounds.collect(number, 1, states(1, 2))
    with pytest.raises(WireError, match="Evaluation task 2"):
        rounds.collect(number, 2, other, outputs)
    assert rounds.collect(number, 2, states(1, 2))


def test_task_whose_records_are_all_dropped_brings_no_outputs_and_is_counted():
    rounds, number = requested()
    rounds.collect(number, 1, states(0, 0))
    rounds.collect(number, 2, states(1, 2), [{"auc": np.ones(3)}])
    rounds.collect(number, 3, states(0, 0))
    np.testing.assert_array_equal(rounds.collection.merged().batches[0]["auc"], np.ones(3))
    with pytest.raises(WireError, match="Evaluation task 4"):
        rounds.collect(number, 4, states(1, 2), [{"other": np.ones(3)}])
