"""Tasks of a stream: ranges that come while the job trains, in epochs, and where they continue after a restart."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from unittest.mock import MagicMock

import pytest
from task_queues import EPOCH_DONE, TRAINING_DONE, reached

from elasticcb.data.unbounded import Partition
from elasticcb.errors import DataError
from elasticcb.master import stream_watch
from elasticcb.master.stream_ranges import Period
from elasticcb.master.task import DecisionKind, QueueSettings
from elasticcb.master.task_queue import TaskQueue


def make_stream(**more):
    given = {"records_per_task": 20, "minibatch_size": 10, "num_epochs": 1, "grows": True, **more}
    return TaskQueue(QueueSettings(**given))


def there(**ends):
    return {name: Partition(start=0, first=0, end=end) for name, end in ends.items()}


def taken(queue, now, worker=1):
    """All ranges that are ready, done at once."""
    found = []
    while (decision := queue.get_task(worker, now)).kind is DecisionKind.TASK:
        found.append(str(decision.lease.task.shard))
        queue.report_done(worker, decision.lease.id)
    return found


def test_whole_batches_come_at_once_and_a_rest_after_a_while():
    queue = make_stream()
    assert taken(queue, 0.0) == []
    queue.grow(there(a=35, b=7), 1.0)
    assert taken(queue, 1.0) == ["a [0, 20)", "a [20, 30)"]
    queue.grow(there(a=35, b=7), 1.9)
    assert taken(queue, 1.9) == []
    assert taken(queue, 2.1) == ["b [0, 7)", "a [30, 35)"]
    queue.grow(there(a=36, b=7), 2.2)
    assert taken(queue, 2.3) == []
    assert queue.trained_to(saved=True) == {"a": 35, "b": 7}


def test_partitions_take_turns_or_follow_each_other():
    queue, in_order = make_stream(), make_stream(in_order=True)
    for each in (queue, in_order):
        each.grow(there(a=40, b=40), 0.0)
    assert taken(queue, 0.0) == ["a [0, 20)", "b [0, 20)", "a [20, 40)", "b [20, 40)"]
    assert taken(in_order, 0.0) == ["a [0, 20)", "a [20, 40)", "b [0, 20)", "b [20, 40)"]


def test_the_rest_of_a_file_is_not_waited_for_when_another_follows():
    queue = make_stream(in_order=True)
    queue.grow(there(a=25, b=7, c=21), 0.0)
    assert taken(queue, 0.0) == ["a [0, 20)", "a [20, 25)", "b [0, 7)", "c [0, 20)"]
    assert taken(queue, 1.1) == ["c [20, 21)"]


def test_workers_go_on_with_the_partitions_that_they_read():
    queue = make_stream()
    queue.grow(there(a=800, b=800, c=800, d=800), 0.0)

    def draw(worker, times):
        found = []
        for _ in range(times):
            lease = queue.get_task(worker, 0.0).lease
            queue.report_done(worker, lease.id)
            found.append(lease.task.shard)
        return found

    assert {shard.name for shard in draw(1, 4)} == {"a", "b", "c", "d"}
    mixed = [next(shard.name for shard in draw(worker, 1)) for _ in range(20) for worker in (1, 2)]
    first, second = set(mixed[::2][-10:]), set(mixed[1::2][-10:])
    assert len(first) == len(second) == 2
    assert not first & second
    assert max(queue.stream.positions.values()) - min(queue.stream.positions.values()) <= 60
    assert {shard.name for shard in draw(2, 40)} == {"a", "b", "c", "d"}  # also those of the other, which may be lost


def test_epochs_end_after_their_records_and_by_time_and_with_the_stream():
    queue = make_stream(num_epochs=9, records_per_epoch=30)
    queue.grow(there(a=50), 0.0)
    assert taken(queue, 0.0) == ["a [0, 20)", "a [20, 30)", "a [30, 50)"]
    assert reached(queue) == [(EPOCH_DONE, 0)]
    assert not queue.end_epoch(0)  # it is over
    assert queue.end_epoch(1)
    assert reached(queue) == [(EPOCH_DONE, 1)]
    assert not queue.end_epoch(1)
    assert not queue.end_epoch(2)  # it has no records yet
    assert reached(queue) == []
    queue.grow({"a": Partition(start=0, first=0, end=60, stop=60)}, 1.0)
    assert taken(queue, 1.0) == ["a [50, 60)"]
    assert reached(queue) == [(EPOCH_DONE, 2), (TRAINING_DONE, 0)]


def test_an_epoch_has_the_records_of_a_period_of_event_time():
    queue = make_stream(num_epochs=9, event_time=60.0)
    queue.grow(there(a=45, b=7), 0.0)
    assert taken(queue, 0.5) == []  # whose records may be drawn is not known yet
    queue.grow(there(a=45, b=7), 0.5, Period(60.0, {"a": 35}))  # of b, more may come
    assert taken(queue, 0.5) == ["a [0, 20)", "a [20, 35)"]
    queue.grow(there(a=45, b=9), 0.6, Period(60.0, {"a": 35}))
    assert reached(queue) == []
    queue = TaskQueue.from_dict(json.loads(json.dumps(queue.to_dict())))  # the job is resumed
    queue.grow(there(a=45, b=19), 0.7, Period(60.0, {"a": 35, "b": 12}))
    assert taken(queue, 0.7) == ["b [0, 12)"]
    assert reached(queue) == [(EPOCH_DONE, 0)]
    assert queue.stream.period_ends[0] == 60.0
    queue.grow(there(a=45, b=19), 0.8, Period(60.0, {"a": 35, "b": 12}))  # is over
    assert taken(queue, 9.0) == []
    queue.grow(there(a=45, b=19, c=3), 9.0, Period(240.0, {"a": 40, "b": 12}))  # without what came too late
    assert taken(queue, 9.0) == ["a [35, 40)"]
    queue.grow(there(a=45, b=19, c=3), 9.1, Period(240.0, {"c": 0}))
    assert reached(queue) == [(EPOCH_DONE, 1)]
    queue.grow(there(a=45, b=19, c=3), 9.2, Period(300.0, {"a": 45, "b": 19, "c": 3}))
    assert sorted(taken(queue, 9.2)) == ["a [40, 45)", "b [12, 19)", "c [0, 3)"]
    assert reached(queue) == [(EPOCH_DONE, 2)]
    assert list(queue.stream.period_ends.values()) == [60.0, 240.0, 300.0]


def test_a_partition_that_stops_within_a_period_does_not_hold_it_open():
    queue = make_stream(num_epochs=9, event_time=60.0)
    seen = {"a": Partition(0, 0, 30, stop=30), "b": Partition(0, 0, 50)}
    queue.grow(seen, 0.0, Period(60.0, {"a": 40, "b": 20}))
    assert sorted(taken(queue, 0.5)) == ["a [0, 20)", "a [20, 30)", "b [0, 20)"]
    assert reached(queue) == [(EPOCH_DONE, 0)]
    queue.grow(seen, 0.6, Period(120.0, {"b": 50}))
    assert taken(queue, 0.6) == ["b [20, 40)", "b [40, 50)"]
    assert reached(queue) == [(EPOCH_DONE, 1)]


def test_records_that_are_removed_may_be_more_than_those_of_the_period():
    queue = make_stream(num_epochs=9, event_time=60.0, skips_lost=True)
    queue.grow(there(a=30, b=10), 0.0, Period(60.0, {"a": 10}))  # of b, more may come
    gone = {"a": Partition(start=0, first=15, end=30), "b": Partition(0, 0, 10)}
    queue.grow(gone, 0.1, Period(60.0, {"a": 10}))
    assert taken(queue, 0.5) == ["b [0, 10)"]
    queue.grow(gone, 0.6, Period(60.0, {"a": 10, "b": 10}))
    assert reached(queue) == [(EPOCH_DONE, 0)]
    queue.grow(gone, 0.7, Period(120.0, {"a": 30, "b": 10}))
    assert taken(queue, 0.7) == ["a [15, 30)"]


def test_a_stop_that_is_known_later_than_records_after_it_is_not_passed():
    queue = make_stream()
    queue.grow(there(a=50), 0.0)
    queue.grow({"a": Partition(0, 0, 60, stop=30)}, 0.1)
    assert taken(queue, 0.1) == ["a [0, 20)", "a [20, 30)"]
    assert reached(queue) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]
    assert queue.stream.ends == {"a": 30}


def test_a_partition_whose_records_were_all_removed_does_not_hold_up_the_next_one():
    queue = make_stream(in_order=True, skips_lost=True)
    queue.grow(there(a=20, b=20), 0.0)
    queue.grow({"a": Partition(0, 20, 20)}, 0.1)
    assert taken(queue, 0.1) == ["b [0, 20)"]


def test_in_order_a_partition_that_is_through_its_period_does_not_hold_up_the_next_one():
    queue = make_stream(in_order=True, num_epochs=9, event_time=60.0)
    queue.grow(there(a=40, b=30), 0.0, Period(60.0, {"a": 20, "b": 10}))
    assert taken(queue, 0.1) == ["a [0, 20)", "b [0, 10)"]
    assert reached(queue) == [(EPOCH_DONE, 0)]
    queue.grow({}, 0.2, Period(120.0, {"a": 40, "b": 30}))
    assert taken(queue, 0.2) == ["a [20, 40)", "b [10, 30)"]


def test_a_look_that_ends_after_its_job_tells_the_next_job_nothing(monkeypatch):
    monkeypatch.setattr(stream_watch, "_END_SECONDS", 0.01)
    asked, answers = threading.Event(), threading.Event()
    source, master = MagicMock(look_seconds=0.001), MagicMock()
    state = master.state.return_value.__enter__.return_value
    state.queue.stream.event_time, state.queue.stream.names = 0.0, set()

    def partitions(known):
        asked.set()
        answers.wait()
        return there(a=5)

    source.partitions = partitions
    watch = stream_watch.StreamWatch(source, master)
    asked.wait()
    watch.close()
    answers.set()
    watch._thread.join()
    state.stream_grew.assert_not_called()


def test_a_stream_without_epochs_is_one():
    queue = make_stream()
    queue.grow(there(a=40), 0.0)
    taken(queue, 0.0)
    assert reached(queue) == []
    queue.grow({"a": Partition(0, 0, 40, stop=40)}, 1.0)
    assert reached(queue) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]


def test_the_stop_is_where_it_was_when_the_job_began():
    queue = make_stream()
    queue.grow({"a": Partition(start=10, first=0, end=30, stop=30)}, 0.0)
    queue.grow({"a": Partition(start=40, first=0, end=90, stop=90)}, 0.0)
    assert taken(queue, 0.0) == ["a [10, 30)"]
    assert reached(queue) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]


def test_the_job_ends_after_a_number_of_records():
    queue = make_stream(most=25)
    queue.grow(there(a=100, b=100), 0.0)
    assert taken(queue, 0.0) == ["a [0, 20)", "b [0, 5)"]
    assert reached(queue) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]


def test_removed_records_are_an_error_or_are_counted():
    queue, skips = make_stream(), make_stream(skips_lost=True)
    for each in (queue, skips):
        each.grow(there(a=20), 0.0)
        taken(each, 0.0)
    removed = {"a": Partition(start=0, first=50, end=60)}
    with pytest.raises(DataError, match=r"30 records of a, from offset 20.*lost_offsets"):
        queue.grow(removed, 1.0)
    assert "30 records" in skips.grow(removed, 1.0)
    assert taken(skips, 1.0) == ["a [50, 60)"]
    assert skips.stream.lost == 30


def test_removed_records_of_tasks_that_are_to_do_again_are_an_error_or_are_counted():
    for skips in (False, True):
        queue = make_stream(skips_lost=skips, num_epochs=9, records_per_epoch=20)
        queue.grow(there(a=60), 0.0)
        queue.get_task(1, 0.0)
        queue.get_task(1, 0.0)
        queue = TaskQueue.from_dict(json.loads(json.dumps(queue.to_dict())))  # the job is resumed
        removed = {"a": Partition(start=0, first=25, end=60)}
        if not skips:
            with pytest.raises(DataError, match=r"20 records of a, from offset 0.*lost_offsets"):
                queue.grow(removed, 1.0)
            continue
        assert "20 records of a, from offset 0" in queue.grow(removed, 1.0)
        assert queue.stream.lost == 25
        assert reached(queue) == [(EPOCH_DONE, 0)]
        assert taken(queue, 1.0) == ["a [25, 40)", "a [40, 60)"]
        assert queue.grow(removed, 2.0) == ""
        assert queue.trained_to(saved=True) == {"a": 60}


def test_a_partition_that_begins_again_is_an_error():
    queue = make_stream()
    queue.grow(there(a=20), 0.0)
    taken(queue, 0.0)
    with pytest.raises(DataError, match="deleted and created again"):
        queue.grow(there(a=5), 1.0)


def test_a_partition_of_another_id_is_an_error_also_after_a_restart():
    queue = make_stream()
    queue.grow({"a": Partition(0, 0, 20)}, 0.0)  # its id is not known yet
    queue.grow({"a": Partition(0, 0, 20, id="one")}, 1.0)
    taken(queue, 1.0)
    queue.grow({"a": Partition(0, 0, 30)}, 2.0)
    queue = TaskQueue.from_dict(json.loads(json.dumps(queue.to_dict())))
    queue.grow({"a": Partition(0, 0, 30, id="one")}, 3.0)
    with pytest.raises(DataError, match="a was deleted and created again"):
        queue.grow({"a": Partition(0, 0, 90, id="two")}, 4.0)


def test_stopping_drops_nothing_that_is_there():
    queue = make_stream()
    queue.grow(there(a=200), 0.0)
    lease = queue.get_task(1, 0.0).lease
    queue.stop_training("asked")
    queue.report_done(1, lease.id)
    assert reached(queue) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]
    assert queue.trained_to(saved=True) == {"a": 20}


def test_epochs_without_end_don_t_fill_the_memory():
    queue = make_stream(num_epochs=10**6, records_per_epoch=10)
    queue.grow(there(a=25_000), 0.0)
    taken(queue, 0.0)
    assert len(queue.accounting.records_trained) <= 1000
    assert sum(queue.accounting.records_trained.values()) == 25_000


def period_of(stream, ends, is_late):
    """As the watch of a stream finds it; an offset is the time of its record."""
    end, positions = stream.period, {**dict.fromkeys(ends, 0), **stream.positions}
    if not stream.in_period:
        waiting = [positions[name] for name in ends if ends[name] > positions[name]]
        if not waiting:
            return None
        end = max(min(waiting) // 50 * 50, end) + 50
    return Period(end, {name: min(end, own) for name, own in ends.items() if own > end or is_late})


@pytest.mark.parametrize("seed", range(24))
def test_every_offset_is_trained_at_least_once_through_losses_and_restarts(seed):
    rng = random.Random(seed)
    event_time = 50.0 * (seed >= 20)
    per_epoch = 0 if event_time else rng.choice([0, 35, 64])
    queue = make_stream(num_epochs=10**6, records_per_epoch=per_epoch, event_time=event_time, repeats_lost=True)
    ends, trained, now = {"a": 0}, Counter(), 0.0
    lost_after = []  # offsets reported since the servers saved

    def note(shard, start, end):
        offsets = [(shard.name, offset) for offset in range(shard.start + start, shard.start + end)]
        trained.update(offsets)
        lost_after.extend(offsets)

    for _ in range(300):
        now += rng.random()
        worker = rng.randrange(1, 4)
        action = rng.randrange(10)
        if action < 3:
            if rng.random() < 0.1:
                ends[f"p{len(ends)}"] = 0
            name = rng.choice([*ends])
            ends[name] += rng.randrange(40)
            period = period_of(queue.stream, ends, rng.random() < 0.5) if event_time else None
            queue.grow(there(**ends), now, period)
        elif action < 7:
            decision = queue.get_task(worker, now)
            if decision.lease is not None:
                shard, lease = decision.lease.task.shard, decision.lease.id
                part = rng.randrange(shard.records + 1)
                queue.report_progress(worker, lease, part, now)
                note(shard, 0, part)
                if rng.random() < 0.6:
                    queue.report_done(worker, lease)
                    note(shard, part, shard.records)
        elif action == 7:
            queue.worker_lost(worker)
            queue = TaskQueue.from_dict(json.loads(json.dumps(queue.to_dict())), now)
        elif action == 8:
            trained.subtract(lost_after)
            lost_after.clear()
            queue.updates_lost()
        else:
            mark = queue.begin_save()
            queue.saved(mark)
            lost_after.clear()
        if rng.random() < 0.05:
            queue.end_epoch(queue.epoch)
        queue.take_milestones()
        low = queue.trained_to(saved=True)
        assert all(trained[name, offset] > 0 for name, end in low.items() for offset in range(end))
    for worker in range(1, 4):
        queue.worker_lost(worker)
    queue = TaskQueue.from_dict(json.loads(json.dumps(queue.to_dict())))
    queue.grow(there(**ends), now)
    for _ in range(1000):
        now += 1.1
        if event_time:
            queue.grow(there(**ends), now, period_of(queue.stream, ends, True))
        decision = queue.get_task(9, now)
        if decision.lease is not None:
            note(decision.lease.task.shard, 0, decision.lease.task.shard.records)
            queue.report_done(9, decision.lease.id)
        queue.take_milestones()
    assert queue.trained_to(saved=True) == ends or all(v <= ends[k] for k, v in queue.trained_to(saved=True).items())
    assert all(trained[name, offset] > 0 for name, end in ends.items() for offset in range(end))
