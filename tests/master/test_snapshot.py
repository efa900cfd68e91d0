"""The display, the summary, the state document and the metrics tell the same numbers of one job."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from master_state import report_progress, settings_of, state_of
from prometheus_client import CollectorRegistry

from elasticcb.cli.figures import status_parts
from elasticcb.cli.progress import summary_lines
from elasticcb.cli.status import state_lines
from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import JobFailedError, JobInterrupted, UsageError
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.master import Master
from elasticcb.master.members import Role, ServedCluster
from elasticcb.master.observation import figures_of
from elasticcb.master.prometheus import JobCollector
from elasticcb.master.roster import Roster
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.task import QueueSettings, TaskResult
from elasticcb.master.task_queue import TaskQueue
from elasticcb.process.stats import Stats
from elasticcb.settings import CheckpointSettings

SETTINGS = replace(
    settings_of(name="ratings", num_workers=2, num_ps=1),
    checkpoint=CheckpointSettings(directory="/nowhere/checkpoints", steps=10),
)


@pytest.fixture
def seen():
    """A job in whose course each number became another one."""
    master = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
    server = master.server
    server.begin_job(SETTINGS)
    ps = server.register(Role.PS, 0, "here:1", 1, "here").id
    workers = [server.register(Role.WORKER, index, "", 2 + index, "here").id for index in range(2)]
    state = state_of(master)
    state.queue = TaskQueue(QueueSettings(records_per_task=10, minibatch_size=5), training=[("a", 90)])
    state.cluster = ServedCluster([], [], False)
    state.queue.add_evaluation(1, [("b", 7)])
    first, second = (server.get_task(worker, (), 0.0).lease.id for worker in workers)
    server.report_done(workers[0], first, TaskResult(11))  # the round
    third = server.get_task(workers[0], (), 0.0).lease.id
    server.report_done(workers[1], second, TaskResult(12, batches_skipped=4))
    report_progress(master, workers[0], third, 5, version=13, loss=0.5)
    state.note_stats(ps, Stats(rows_looked_up=17, refused_calls={"malformed": 21}))
    server.lost(workers[1], "killed")
    state.totals.recovered(2.5, updates_lost=19)
    state.totals.callback_errors, state.totals.checkpoints_failed = 22, 23
    state.totals.recovery_files_failed = 24
    server.exported(12, "s3://models/clicks")
    server.set_status(phase="training", metrics={"auc": 0.75})
    yield master.observe()
    master.stop()


def numbers_of(lines):
    """By what stands before it, the first number of each line."""
    found = (re.fullmatch(r"  (.+?) +([\d.]+)(?: malformed| \(.*)?", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


def test_all_that_is_shown_of_a_job_has_the_same_numbers(seen):
    state, summary = seen.to_json(), numbers_of(summary_lines(seen))
    registry = CollectorRegistry()
    registry.register(JobCollector(lambda: seen))

    def metric(name, **labels):
        return registry.get_sample_value(f"elasticcb_{name}", labels)

    workers = state["workers"]
    tasks = {each: sum(states[each] for states in state["tasks"].values()) for each in ("todo", "doing", "done")}
    same = [  # what it must be, and how each tells it
        (15, state["records_trained"], summary["records trained"], metric("records_total", type="training")),
        (
            7,
            state["records_evaluated"],
            summary["records evaluated, once each"],
            metric("records_total", type="evaluation"),
        ),
        (90, state["records_total"], metric("records_planned")),
        (0, state["records_repeated"], metric("records_repeated_total")),
        (17, state["rows_looked_up"], metric("lookup_rows_total")),
        (7, tasks["todo"], metric("tasks", type="training", state="todo")),
        (1, tasks["doing"], metric("tasks", type="training", state="doing")),
        (2, tasks["done"], sum(metric("tasks", type=kind, state="done") for kind in ("training", "evaluation"))),
        (0, state["tasks_retried"], metric("tasks_retried_total")),
        (2, workers["planned"]),
        (1, workers["up"], metric("processes", role="worker", state="up")),
        (1, workers["lost"], summary["workers lost"], metric("processes_lost_total", role="worker")),
        (0, workers["replaced"], metric("recoveries_total", role="worker")),
        (2.5, state["longest_recovery_seconds"]),
        (19, state["updates_lost"], summary["updates lost with them"], metric("updates_lost_total")),
        (4, state["batches_skipped"], summary["batches skipped (NaN or infinity)"], metric("batches_skipped_total")),
        (22, state["callback_errors"], summary["errors in callbacks"], metric("callback_errors_total")),
        (23, state["checkpoints_failed"], summary["checkpoints not written"], metric("checkpoints_failed_total")),
        (24, state["recovery_files_failed"], metric("recovery_files_failed_total")),
        (12, state["export_version"]),
        (seen.export_age_seconds, state["export_age_seconds"], metric("export_age_seconds")),
        (seen.checkpoint_age_seconds, state["checkpoint_age_seconds"], metric("checkpoint_age_seconds")),
        (seen.free_disk_bytes["job"], state["free_disk_bytes"]["job"], metric("free_disk_bytes", folder="job")),
        (21, state["refused_calls"]["malformed"], metric("refused_calls_total", reason="malformed")),
        (21, summary["calls refused"]),
        (13, state["version"], summary["model version"], metric("model_version")),
        (0.75, state["metrics"]["auc"], summary["auc"], metric("evaluation_metric", metric="auc")),
        (0.5, state["loss"], metric("training_loss")),
    ]
    assert [found for found in same if len(set(found)) > 1] == []


def test_time_left_does_not_jump_when_tasks_count_their_records_only_at_their_end():
    """As with a feed that shuffles: two workers train a batch of 10 records a second, in tasks of 20 batches."""
    state = JobMachine(Roster(2, 0, 5, 5), number=1, settings=SETTINGS)
    state.queue = queue = TaskQueue(QueueSettings(records_per_task=200, minibatch_size=10), training=[("a", 4000)])
    found = []
    for task in range(10):
        leases = [queue.get_task(worker, 20.0 * task).lease for worker in (1, 2)]
        for second in range(1, 21):
            now = 20.0 * task + second
            for worker in (1, 2):
                state.speeds.not_counted(worker, 1)
            state.note_progress(now)
            if (left := figures_of(queue, state, now)["seconds_left"]) is not None:
                found.append(now + left)
        for worker, lease in zip((1, 2), leases, strict=True):
            queue.report_done(worker, lease.id)
            state.speeds.task_ended(worker)
    assert found[10:] == pytest.approx([200.0] * (len(found) - 10), abs=1.0)


def test_task_that_is_fetched_ahead_is_still_to_do():
    queue = TaskQueue(QueueSettings(records_per_task=10, minibatch_size=5), training=[("a", 90)])
    first = queue.get_task(1, 0.0).lease
    queue.get_task(1, 0.0, [first.id])
    queue.get_task(2, 0.0)
    tasks = figures_of(queue, JobMachine(Roster(2, 0, 5, 5), number=1, settings=SETTINGS), 0.0)["tasks"]
    assert (tasks["training", "doing"], tasks["training", "todo"]) == (2, 7)


def test_the_live_display_and_the_status_command_show_the_same_figures(seen):
    shown = [part for part in status_parts(seen) if "records/s" not in part and "left" not in part]
    assert shown == [
        "epoch 1/1",
        "17% (15/90 records)",
        "version 13",
        "loss 0.5000",
        "val_auc 0.7500",
        "workers 1/2",
        "servers 1/1",
        "tasks 7 to do, 1 running",
    ]
    lines = state_lines(seen.to_json())
    assert ", ".join(status_parts(seen)) in lines[1]
    assert "  exports: up to version 12 in s3://models/clicks" in lines


def test_checkpoint_is_as_old_as_the_last_one_that_was_written(seen, tmp_path):
    master = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
    settings = replace(SETTINGS, directory=str(tmp_path), checkpoint=CheckpointSettings())
    master.server.begin_job(settings)
    assert master.observe().checkpoint_age_seconds is None
    assert master.observe().free_disk_bytes.keys() == {"job"}
    master.server.begin_job(SETTINGS, started=-1000.0)
    before = master.observe()
    master.server.checkpoint_written()
    after = master.observe()
    master.stop()
    assert before.checkpoint_age_seconds >= 1000
    assert after.checkpoint_age_seconds < 1000
    assert after.free_disk_bytes.keys() == {"job", "checkpoint"}


# ---------------------------------------------------------------- elasticcb status --json, and its documentation


PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def master():
    """One whose job runs, with one of two workers."""
    master = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
    master.server.begin_job(SETTINGS)
    master.server.register(Role.PS, 0, "here:1", 1, "here")
    worker = master.server.register(Role.WORKER, 1, "", 2, "here").id
    state_of(master).queue = TaskQueue(QueueSettings(records_per_task=10, minibatch_size=5), training=[("a", 30)])
    state_of(master).cluster = ServedCluster([], [], False)
    lease = master.server.get_task(worker, (), 0.0).lease
    report_progress(master, worker, lease.id, 5, version=3, loss=float("inf"))
    return master


def conditions_of(state):
    return {condition["type"]: condition["status"] == "True" for condition in state["conditions"]}


def test_the_state_of_a_job_that_runs_names_what_is_missing(master):
    state = json.loads(json.dumps(master.observe().to_json(), allow_nan=False))
    assert conditions_of(state) == {"Ready": True, "Degraded": True, "Complete": False, "Failed": False}
    assert (state["name"], state["version"], state["loss"], state["epochs"]) == ("ratings", 3, None, 1)
    assert (state["records_trained"], state["records_total"]) == (5, 30)
    assert (state["tasks"]["training"]["todo"], state["tasks"]["training"]["doing"]) == (2, 1)
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
    state = master.observe().ended(error).to_json()
    assert state["phase"] == phase
    assert conditions_of(state) == {
        "Ready": False,
        "Degraded": False,
        "Complete": error is None,
        "Failed": error is not None,
    }
    assert state["error"] == str(error or "")
    label = "Failed: " if phase == "failed" else ""
    assert not error or "\n".join(state_lines(state)).endswith(f"  {label}{error}")


def test_the_documented_keys_are_those_of_the_document(master):
    table = re.search(r"<!-- begin state -->(.*)<!-- end state -->", PAGE.read_text(), re.DOTALL)[1]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    state = master.observe().to_json()
    assert [key for keys, _ in rows for key in re.findall(r"`(\w+)`", keys)] == list(state)
    described = {key: set(re.findall(r"`(\w+)`", text)) for keys, text in rows for key in re.findall(r"`(\w+)`", keys)}
    for key in ("workers", "servers"):
        assert set(state[key]) <= described[key], key
    assert set(state["tasks"]["training"]) <= described["tasks"]
    assert set(state["processes"][0]) <= described["processes"]
    assert set(state["conditions"][0]) <= described["conditions"]


@pytest.mark.parametrize("wrong", [{"metrics": [7]}, {"version": "x"}, {"name": 7}, {"workers": None}])
def test_a_state_of_another_release_or_that_was_changed_is_refused_in_words(wrong):
    document = JobSnapshot().to_json()
    assert state_lines({**document, "command": "train"})
    with pytest.raises(UsageError, match="The job's state can't be read"):
        state_lines({**document, **wrong})


def test_before_there_is_a_job_there_is_a_state_with_the_same_keys(master):
    empty = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
    assert empty.observe().to_json().keys() == master.observe().to_json().keys()
