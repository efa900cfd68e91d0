"""What `elasticcb status --json` tells, and its documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from master_state import settings_of, state_of

from elasticcb.cli.status import state_lines
from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import JobFailedError, JobInterrupted
from elasticcb.master.cluster_state import ServedCluster
from elasticcb.master.master import Master
from elasticcb.master.members import Role
from elasticcb.master.queue_settings import QueueSettings
from elasticcb.master.state_document import document
from elasticcb.master.task_queue import TaskQueue

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SETTINGS = settings_of(name="ratings", num_workers=2, num_ps=1)


@pytest.fixture
def master():
    """One whose job runs, with one of two workers."""
    master = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
    master.desk.begin_job(SETTINGS)
    master.calls.register(Role.PS, 0, "here:1", 1, "here")
    worker = master.calls.register(Role.WORKER, 1, "", 2, "here").id
    state_of(master).queue = TaskQueue(QueueSettings(records_per_task=10, minibatch_size=5), training=[("a", 30)])
    state_of(master).cluster = ServedCluster([], [], False)
    lease = master.calls.get_task(worker, (), 0.0).lease
    master.calls.report_progress(worker, lease.id, 5, True, 3, float("inf"))
    return master


def conditions_of(state):
    return {condition["type"]: condition["status"] == "True" for condition in state["conditions"]}


def test_the_state_of_a_job_that_runs_names_what_is_missing(master):
    state = json.loads(json.dumps(document(master.observe()), allow_nan=False))
    assert conditions_of(state) == {"Ready": True, "Degraded": True, "Complete": False, "Failed": False}
    assert (state["name"], state["version"], state["loss"], state["epochs"]) == ("ratings", 3, None, 1)
    assert (state["records"]["trained"], state["records"]["planned"]) == (5, 30)
    assert (state["tasks"]["todo"], state["tasks"]["doing"]) == (2, 1)
    assert (state["workers"]["planned"], state["workers"]["up"]) == (2, 1)
    assert [(each["role"], each["index"], each["state"], each["pid"]) for each in state["processes"]] == [
        ("worker", 0, "planned", None),
        ("worker", 1, "up", 2),
        ("ps", 0, "up", 1),
    ]
    lines = state_lines(state)
    assert "workers 1/2" in lines[1]
    assert lines[-1] == "  Degraded: workers missing: 1"


@pytest.mark.parametrize(
    ("error", "phase"),
    [(None, "done"), (JobInterrupted("Ctrl-C"), "interrupted"), (JobFailedError("why\nhow"), "failed")],
)
def test_the_state_of_a_job_that_is_over_tells_how_it_ended(master, error, phase):
    state = document(master.observe(), error, over=True)
    assert state["phase"] == phase
    assert conditions_of(state) == {
        "Ready": False,
        "Degraded": False,
        "Complete": error is None,
        "Failed": error is not None,
    }
    assert state["error"] == str(error or "")
    label = "Failed: " if phase == "failed" else ""
    assert not error or state_lines(state)[-1] == f"  {label}{str(error).splitlines()[0]}"


def test_the_documented_keys_are_those_of_the_document(master):
    table = re.search(r"<!-- begin state -->(.*)<!-- end state -->", PAGE.read_text(), re.DOTALL)[1]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    state = document(master.observe())
    assert [key for keys, _ in rows for key in re.findall(r"`(\w+)`", keys)] == list(state)
    described = {keys.strip(" `"): set(re.findall(r"`(\w+)`", text)) for keys, text in rows}
    for key in ("records", "tasks", "workers", "parameter_servers"):
        assert set(state[key]) <= described[key], key
    assert set(state["processes"][0]) <= described["processes"]
    assert set(state["conditions"][0]) <= described["conditions"]


def test_before_there_is_a_job_there_is_a_state_with_the_same_keys(master):
    empty = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
    assert document(empty.observe()).keys() == document(master.observe()).keys()
