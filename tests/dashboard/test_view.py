"""How a page's process follows a job over its masters, to its end."""

import pytest

from elasticcb.dashboard.server import JobView
from elasticcb.master.job_history import JobHistory
from elasticcb.master.shards import Shard
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.task import Lease, Task, TaskType
from elasticcb.settings import HISTORY_FILE, STATUS_FILE
from elasticcb.storage import durable


class Clock:
    now = 1000.0

    def __call__(self):
        self.now += 10.0
        return self.now


class View(JobView):
    """Of a job whose master is in this process: the past that `past` keeps."""

    past = None

    def _ask(self):
        return {"processes": []}, self.past.after(self._known[1] if self.past.after(0)["run"] == self._known[0] else 0)


@pytest.fixture
def view(tmp_path):
    return View(tmp_path)


def live(past, version):
    past.note(JobSnapshot(version=version), (), (0, 0.0))


def end(view):
    durable.write_document(view.folder / STATUS_FILE, {"phase": "interrupted", "error": ""})
    durable.write_document(view.folder / HISTORY_FILE, view.past.after(0))
    view.look()


def shown(view):
    past = view.everything()["past"]
    return [entry[1] for _, entry in past["points"]], [entry[2] for _, entry in past["events"]]


def test_a_job_that_is_resumed_goes_on_with_what_is_known_of_it(view):
    clock = Clock()
    view.past = JobHistory(clock)
    live(view.past, 1)
    view.past.record_event("note", "one")
    view.look()
    live(view.past, 2)
    view.past.record_event("note", "two")
    end(view)
    (view.folder / STATUS_FILE).unlink()
    view.past = JobHistory(clock, durable.read_document(view.folder / HISTORY_FILE))
    live(view.past, 3)
    view.past.record_event("note", "three")
    view.look()
    view.look()
    assert shown(view) == ([1, 2, 3], ["one", "two", "three"])
    another = View(view.folder)
    another.past = view.past
    another.look()
    assert shown(another) == shown(view)


def test_the_history_of_a_job_that_has_ended_is_read_again_only_when_it_has_changed(view, monkeypatch):
    read, reads = durable.read_document, []
    monkeypatch.setattr(durable, "read_document", lambda path: reads.append(path.name) or read(path))
    view.past = JobHistory(Clock())
    live(view.past, 1)
    end(view)
    view.look()
    assert reads.count(HISTORY_FILE) == 1
    live(view.past, 2)
    end(view)
    assert reads.count(HISTORY_FILE) == 2
    assert shown(view) == ([1, 2], [])


def test_no_task_runs_in_a_job_that_has_ended(view):
    view.past = JobHistory(Clock())
    view.past.began(Lease(1, Task(1, TaskType.TRAINING, Shard("a", 0, 10)), worker=0), 0)
    view.look()
    assert len(view.everything()["running"]) == 1
    end(view)
    assert view.over
    assert view.everything()["running"] == []
