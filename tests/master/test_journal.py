from __future__ import annotations

import shutil

import keras
import numpy as np
import pytest

from elasticcb.callbacks.saved_state import CallbackStates
from elasticcb.errors import JobFailedError, ReplacedError
from elasticcb.master import journal as journal_module
from elasticcb.master.journal import Journal
from elasticcb.master.task import DecisionKind, QueueSettings
from elasticcb.master.task_queue import TaskQueue
from elasticcb.storage import durable


def states(number):
    return {"loss": [np.array(number, np.float32), np.arange(3) * number]}


def test_journal_tells_what_was_written(tmp_path):
    journal = Journal(tmp_path / "journal.log")
    assert journal.memory.queue is None
    journal.add(run="abc", ended_epochs=0)
    journal.add(queue={"format": 1}, version=5, states=[(0, states(2))])
    journal.add(queue={"format": 2}, version=7, states=[(1, states(3))])
    journal.close()
    memory = Journal(tmp_path / "journal.log").memory
    assert (memory.run, memory.queue, memory.version) == ("abc", {"format": 2}, 7)
    assert sorted(memory.states) == [0, 1]
    np.testing.assert_array_equal(memory.states[1][0]["loss"][1], [0, 3, 6])
    assert memory.states[1][0]["loss"][0].dtype == np.float32


def test_who_removes_the_folder_of_a_running_job_is_not_told_of_another_master(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    journal = Journal(folder / "journal.log")
    journal.begin()
    shutil.rmtree(folder)
    with pytest.raises(JobFailedError, match="was removed while the job was running") as failure:
        journal.add(version=1)
    assert not isinstance(failure.value, ReplacedError)


def test_epoch_that_is_ended_takes_its_states_with_it(tmp_path):
    journal = Journal(tmp_path / "journal.log")
    journal.add(states=[(0, states(1)), (1, states(2))])
    journal.add(ended_epochs=1, callbacks=[["Best", {"best": 0.5}]], logs={"loss": 1.0})
    journal.close()
    memory = Journal(tmp_path / "journal.log").memory
    assert list(memory.states) == [1]
    assert (memory.callbacks, memory.logs) == ([["Best", {"best": 0.5}]], {"loss": 1.0})


def test_last_entry_that_was_cut_off_is_left_out_and_one_can_go_on(tmp_path):
    path = tmp_path / "journal.log"
    journal = Journal(path)
    journal.add(version=1)
    journal.add(version=22222)
    journal.close()
    path.write_bytes(path.read_bytes()[:-3])
    journal = Journal(path)
    assert journal.memory.version == 1
    journal.add(version=3)
    journal.close()
    assert Journal(path).memory.version == 3


def test_master_that_is_replaced_while_it_rewrites_its_journal_says_so(tmp_path, monkeypatch):
    path = tmp_path / "journal.log"
    journal = Journal(path)
    journal.add(version=1)

    def replace(unfinished):  # what this master has written lies beside its place
        monkeypatch.undo()
        Journal(path).add(version=2)
        durable.drop_unfinished(tmp_path)
        durable.sync(unfinished)

    monkeypatch.setattr(durable, "sync", replace)
    with pytest.raises(ReplacedError, match="Another master took over"):
        journal.rewrite([])
    assert Journal(path).memory.version == 2


def test_of_the_queue_only_what_has_changed_is_written(tmp_path):
    path = tmp_path / "journal.log"
    sources = [[f"part-{number}", 1000] for number in range(100)]
    journal = Journal(path)
    journal.add({"queue": {"training": sources, "predicted": 0}})
    first = path.stat().st_size
    journal.add({"queue": {"training": sources, "predicted": 1}})
    assert path.stat().st_size < 1.1 * first
    journal.close()
    journal = Journal(path)
    assert journal.memory.queue == {"training": sources, "predicted": 1}
    journal.rewrite([])
    journal.close()
    assert Journal(path).memory.queue == {"training": sources, "predicted": 1}


def test_journal_is_large_again_only_after_it_has_grown_by_as_much_as_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_LARGE_BYTES", 100)
    written = Journal(tmp_path / "journal.log")
    written.rewrite([(0, {"maxima": [np.ones(1000)]})])
    sizes = []
    for version in range(1000):
        written.add(version=version)
        if written.is_large:
            sizes.append((tmp_path / "journal.log").stat().st_size)
            written.rewrite([(0, {"maxima": [np.ones(1000)]})])
    assert 1 <= len(sizes) <= 3
    assert min(sizes) > 20_000


def test_journal_that_can_not_be_opened_is_an_error_that_names_it(tmp_path):
    with pytest.raises(JobFailedError, match=r"nowhere/journal\.log can't be written"):
        Journal(tmp_path / "nowhere" / "journal.log")


# ------------------------------------------------------------ the queue


def queue_of(epochs=2, **more):
    return TaskQueue(
        QueueSettings(records_per_task=10, minibatch_size=5, num_epochs=epochs, **more), training=[("a", 40)]
    )


def work(queue, tasks):
    for _ in range(tasks):
        lease = queue.get_task(1, 0.0).lease
        queue.report_done(1, lease.id)


def kinds(queue):
    return [(milestone.kind.name, milestone.number) for milestone in queue.take_milestones()]


def test_milestones_that_were_taken_but_not_carried_out_come_again():
    queue = queue_of()
    work(queue, 8)
    assert kinds(queue) == [("EPOCH_DONE", 0), ("EPOCH_DONE", 1), ("TRAINING_DONE", 0)]
    for ended, expected in ((0, [0, 1]), (1, [1]), (2, [])):
        again = TaskQueue.from_dict(queue.to_dict())
        again.repeat_milestones(ended)
        assert kinds(again) == [("EPOCH_DONE", epoch) for epoch in expected] + [("TRAINING_DONE", 0)]


def test_epoch_ends_again_only_when_what_servers_had_lost_of_it_is_trained():
    queue = queue_of(repeats_lost=True)
    work(queue, 1)
    queue.saved(queue.begin_save())
    work(queue, 6)  # of the first epoch, three are not saved; the second is not over
    assert kinds(queue) == [("EPOCH_DONE", 0)]
    again = TaskQueue.from_dict(queue.to_dict())
    again.repeat_milestones(0)  # its end was not carried out
    assert again.updates_lost()
    assert kinds(again) == []
    work(again, 7)
    assert kinds(again) == [("EPOCH_DONE", 0), ("EPOCH_DONE", 1)]
    assert again.accounting.records_trained == {0: 40, 1: 40}


def test_queue_that_was_paused_hands_out_nothing_and_goes_on_when_it_was_saved():
    queue = queue_of(1)
    lease = queue.get_task(1, 0.0).lease
    queue.pause("interrupt", "the job is being interrupted")
    assert queue.get_task(1, 0.0).kind is DecisionKind.WAIT
    assert queue.report_done(1, lease.id).accepted
    again = TaskQueue.from_dict(queue.to_dict())
    work(again, 3)
    assert again.training_done
    assert again.stop_reason is None


def test_train_end_that_was_added_is_not_preceded_by_the_end_of_training_again():
    queue = queue_of(1)
    work(queue, 4)
    queue.add_train_end()
    again = TaskQueue.from_dict(queue.to_dict())
    again.repeat_milestones(1)
    assert kinds(again) == []
    work(again, 1)
    assert kinds(again) == [("TRAIN_END_DONE", 0)]
    once_more = TaskQueue.from_dict(again.to_dict())
    once_more.repeat_milestones(1)
    assert kinds(once_more) == [("TRAIN_END_DONE", 0)]


# ------------------------------------------------------------ callbacks


def test_callbacks_of_other_classes_stay_as_they_are():
    history = keras.callbacks.History()
    CallbackStates([history], print).restore([["EarlyStopping", {"wait": 3}]], {})
    assert not hasattr(history, "wait")
