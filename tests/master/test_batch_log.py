from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticcb.master import batch_log
from elasticcb.master.batch_log import BatchEvent, BatchLog, NumberedBatch
from elasticcb.settings import Mode


def trained(version: int, epoch: int = 0, size: int = 8, **logs: float) -> BatchEvent:
    return BatchEvent(Mode.TRAINING, epoch, version, size, logs)


def versions(batches: list[NumberedBatch]) -> list[int]:
    return [batch.event.version for batch in batches]


def test_batch_waits_until_no_training_worker_can_report_an_older_one() -> None:
    log = BatchLog()
    log.add(1, 5, [trained(3), trained(5)])
    assert log.take({1, 2}) == []  # nothing is known of worker 2
    log.add(2, 4, [trained(4)])
    assert versions(log.take({1, 2})) == [3, 4]
    log.add(2, 9, [])
    assert versions(log.take({1, 2})) == [5]


def test_worker_that_does_not_train_holds_nothing_up() -> None:
    log = BatchLog()
    log.add(1, 5, [trained(5)])
    log.add(2, 1, [])
    assert log.take({1, 2}) == []
    assert versions(log.take({1})) == [5]
    log.add(1, 6, [trained(6)])
    assert versions(log.take(())) == [6]


def test_end_of_an_epoch_gives_out_its_batches_and_leaves_those_of_the_next() -> None:
    log = BatchLog()
    log.add(1, 9, [trained(2), trained(3, epoch=1), trained(9)])
    assert versions(log.end(Mode.TRAINING, 0)) == [2, 9]
    assert [(batch.event.version, batch.index) for batch in log.take({1})] == [(3, 0)]


def test_batch_of_an_epoch_that_is_over_is_dropped() -> None:
    log = BatchLog()
    log.end(Mode.TRAINING, 1)
    log.add(1, 7, [trained(7, epoch=1), trained(7, epoch=2)])
    assert [batch.event.number for batch in log.take({1})] == [2]


def test_batches_are_numbered_from_zero_in_each_epoch() -> None:
    log = BatchLog()
    log.add(1, 3, [trained(1), trained(2), trained(3, epoch=1)])
    assert [(batch.event.number, batch.index) for batch in log.take({1})] == [(0, 0), (0, 1), (1, 0)]
    log.add(1, 5, [trained(4, epoch=1), trained(5, epoch=1)])
    assert [batch.index for batch in log.end(Mode.TRAINING, 1)] == [1, 2]


def test_means_are_over_the_records_of_the_epoch_so_far() -> None:
    log = BatchLog()
    log.add(
        1, 3, [trained(1, size=30, loss=1.0), trained(2, size=10, loss=5.0, mae=2.0), trained(3, epoch=1, loss=7.0)]
    )
    means = [batch.means for batch in log.take({1})]
    assert means == [{"loss": 1.0}, {"loss": 2.0, "mae": 2.0}, {"loss": 7.0}]


def test_batches_of_evaluation_and_prediction_are_given_out_as_they_come() -> None:
    log = BatchLog()
    tested = [BatchEvent(Mode.EVALUATION, 2, 9, 8), BatchEvent(Mode.EVALUATION, 2, 9, 8)]
    log.add(1, 0, [*tested, BatchEvent(Mode.PREDICTION, 0, 0, 8)])
    taken = log.take({1, 2})
    assert [(batch.event.kind, batch.index) for batch in taken] == [
        (Mode.EVALUATION, 0),
        (Mode.EVALUATION, 1),
        (Mode.PREDICTION, 0),
    ]
    log.add(2, 0, tested[:1])
    assert [batch.index for batch in log.end(Mode.EVALUATION, 2)] == [2]
    log.add(2, 0, [BatchEvent(Mode.EVALUATION, 3, 9, 8)])
    assert [batch.index for batch in log.take(())] == [0]


def test_beyond_the_limit_the_oldest_wait_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_log, "_MOST_WAITING", 2)
    log = BatchLog()
    log.add(1, 9, [trained(version) for version in (4, 2, 9, 7)])
    assert versions(log.take({1, 2})) == [2, 4]


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=60), st.data())
def test_order_is_that_of_versions_whatever_the_order_of_reports(pushes: list[tuple[int, bool]], data) -> None:
    log, unsent, seen = BatchLog(), {1: [], 2: [], 3: []}, []
    for version, (worker, reports) in enumerate(pushes, 1):
        unsent[worker].append(trained(version))
        if reports:
            log.add(worker, version, unsent[worker])
            unsent[worker] = []
        if data.draw(st.booleans()):
            seen += versions(log.take({1, 2, 3}))
    for worker, events in unsent.items():
        log.add(worker, len(pushes), events)
    seen += versions(log.end(Mode.TRAINING, 0))
    assert seen == list(range(1, len(pushes) + 1))


def test_no_more_batches_are_given_out_at_once_than_asked_for_and_none_is_lost() -> None:
    log = BatchLog()
    log.add(1, 3, [trained(1), BatchEvent(Mode.EVALUATION, 1, 1, 8), trained(2), trained(3)])
    taken = [log.take({1}, most=2) for _ in range(3)]
    assert [len(batches) for batches in taken] == [2, 2, 0]
    assert versions([*taken[0][1:], *taken[1]]) == [1, 2, 3]
    assert not len(log)
