"""How long workers train before their work is merged."""

import pytest

from elasticcb.worker.local_updates import WindowLength


def length_after(batch_seconds, merges, given=None):
    length = WindowLength(given)
    for seconds in merges:
        for _ in range(length.batches):
            length.note_batch(batch_seconds)
        length.note_merge(seconds)
    return length.batches


@pytest.mark.parametrize(
    ("batch_seconds", "merge_seconds", "expected"),
    [(0.010, 0.010, 20), (0.010, 0.0101, 21), (0.010, 1.0, 64), (0.100, 0.001, 4), (0.0, 0.001, 64)],
)
def test_merging_takes_a_twentieth_of_the_time_of_training(batch_seconds, merge_seconds, expected):
    assert length_after(batch_seconds, [merge_seconds] * 3) == expected


def test_waiting_for_others_makes_windows_longer_if_it_is_usual():
    assert length_after(0.010, [5.0, 0.010, 0.010, 0.2, 0.010]) == 20
    assert length_after(0.010, [0.010] * 4 + [0.020] * 5) == 40
    assert length_after(0.010, [0.010] * 9 + [0.020] * 9) == 40  # a merge that is long past tells nothing


def test_a_batch_that_was_compiled_or_had_to_wait_makes_none_shorter():
    length = WindowLength(None)
    for seconds in (9.0, 0.010, 0.010, 0.010, 2.0):
        length.note_batch(seconds)
    length.note_merge(0.010)
    assert length.batches == 20


def test_a_given_length_stays():
    assert WindowLength(7).batches == 7
    assert length_after(0.010, [0.010, 3.0], given=7) == 7


def test_slots_are_merged_as_long_as_they_take_a_twentieth_of_the_time():
    now = 100.0
    length = WindowLength(None, clock=lambda: now)
    assert length.slots_are_due  # so that a job has some from its first task on
    length.note_merge(5.0, with_slots=True)  # it waited for others
    now += 1.0
    length.note_merge(0.2, with_slots=True)
    assert not length.slots_are_due
    now += 3.9
    length.note_merge(0.010)
    assert not length.slots_are_due
    now += 0.2
    assert length.slots_are_due


def test_merging_slots_makes_no_window_longer():
    length = WindowLength(None)
    for seconds, with_slots in ((0.010, False), (0.5, True)):
        length.note_batch(0.010)
        length.note_merge(seconds, with_slots)
    assert length.batches == 20
