"""Creates a `JobSnapshot`, under the master's lock."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticcb.master.job_machine import JobMachine
from elasticcb.master.members import PlaceState, Role
from elasticcb.master.snapshot import JobSnapshot, ProcessCounts, ProcessSnapshot
from elasticcb.master.task import TaskState
from elasticcb.master.task_queue import TaskQueue
from elasticcb.process.host import host_name
from elasticcb.process.stats import SECONDS, Histogram, TableSize, histograms, resident_bytes
from elasticcb.settings import Command, JobSettings
from elasticcb.settings.training import ENDLESS
from elasticcb.storage.remote_files import is_url


def observe(state: JobMachine, refused: Mapping[str, int], now: float) -> JobSnapshot:
    """A snapshot of the job at time `now`, in seconds."""
    settings, totals = state.settings, state.totals
    processes = tuple(_process(state, role, index, now) for role, index in state.roster.places())
    return replace(
        state.status,
        phase="evaluating" if state.rounds.running is not None else state.status.phase,
        ready=state.ready,
        seconds=now - state.started,
        version=state.version,
        loss=state.loss,
        batches_skipped=totals.batches_skipped,
        bad_records=totals.bad_records,
        callback_errors=totals.callback_errors,
        checkpoints_failed=totals.checkpoints_failed,
        workers=_counts(state, Role.WORKER),
        servers=_counts(state, Role.PS),
        servers_restoring=len(state.lost_ps),
        longest_recovery_seconds=totals.longest_recovery,
        updates_lost=totals.updates_lost,
        recovery_files_failed=totals.recovery_files_failed,
        stragglers=tuple(process.index for process in processes if process.straggler),
        stragglers_ever=tuple(sorted(totals.stragglers)),
        processes=processes,
        cpu_seconds=time.process_time(),
        resident_bytes=resident_bytes(),
        **_of_settings(state, settings, now),
        tables=_tables(state),
        **_added_up(state, refused),
        **({} if state.queue is None else figures_of(state.queue, state, now)),
    )


def records_to_train(settings: JobSettings, queue: TaskQueue) -> int:
    """Total over all epochs."""
    training = settings.training
    total = queue.records_per_epoch * training.num_epochs
    return min(total, training.max_step * training.minibatch_size) if training.max_step else total


def _of_settings(state: JobMachine, settings: JobSettings | None, now: float) -> dict[str, Any]:
    if settings is None:
        return {}
    values = {"command": settings.command, "name": settings.name, "directory": settings.directory}
    due = settings.checkpoint.directory and settings.checkpoint.steps
    return values | {
        "checkpoint_age_seconds": now - state.checkpoint_written if due else None,
        "export_age_seconds": None if state.exported is None else now - state.exported,
    }


def free_disk_bytes(settings: JobSettings | None) -> dict[str, int]:
    """Free space of the job's local folders, where known. May be slow: don't hold the master's lock."""
    found: dict[str, int] = {}
    if settings is not None:
        for name, path in (("job", settings.directory), ("checkpoint", settings.checkpoint.directory)):
            if path and not is_url(path):
                with contextlib.suppress(OSError):
                    place = next(folder for folder in (Path(path), *Path(path).parents) if folder.exists())
                    found[name] = shutil.disk_usage(place).free
    return found


def figures_of(queue: TaskQueue, state: JobMachine, now: float) -> dict[str, Any]:
    """Fields of a snapshot that tell how far the job is, by this queue."""
    settings = state.settings
    if settings is None:
        return {}
    accounting = queue.accounting
    values = {
        "tasks": _tasks(queue),
        "tasks_retried": accounting.tasks_retried,
        "tasks_taken_over": accounting.tasks_taken_over,
        "tasks_split": accounting.tasks_split,
        "reports_refused": accounting.reports_refused,
        "records_per_epoch": tuple(count for _, count in sorted(accounting.records_trained.items())),
        "records_evaluated": accounting.records_evaluated - state.evaluated_before,
        "records_evaluated_before": state.evaluated_before,
        "records_predicted": accounting.records_predicted,
        "records_repeated": accounting.records_repeated,
        "stopped_early": queue.stop_reason or "",
    }
    if settings.command is not Command.TRAIN:
        return values
    total, begun, speed = records_to_train(settings, queue), state.speeds.begun(queue), state.speeds.records
    return values | {
        "epoch": queue.epoch + 1,
        "epochs": epochs_of(settings),
        "records_lost": 0 if queue.stream is None else queue.stream.lost,
        "records_total": total,
        "records_per_second": speed.per_second(now, begun),
        "seconds_left": max(total - begun, 0) / speed.smoothed if speed.smoothed and queue.stream is None else None,
    }


def epochs_of(settings: JobSettings) -> int:
    """The planned number of epochs; 0: without end."""
    return 0 if settings.training.num_epochs == ENDLESS else settings.training.num_epochs


def _tasks(queue: TaskQueue) -> dict[tuple[str, str], int]:
    """The number of tasks, by type and state. A task that a worker has fetched ahead is still to do."""
    counts = queue.counts()
    busy: set[int] = set()
    for lease in queue.leases():
        if lease.worker in busy:
            counts[lease.task.type][TaskState.DOING] -= 1
            counts[lease.task.type][TaskState.TODO] += 1
        busy.add(lease.worker)
    return {
        (kind.value.lower(), state.value.lower()): count
        for kind, states in counts.items()
        for state, count in states.items()
    }


def _added_up(state: JobMachine, refused: Mapping[str, int]) -> dict[str, Any]:
    """Statistics summed over all processes, past and present."""
    rows, refusals, total = 0, Counter(refused), histograms()
    for stats in state.stats.values():
        rows += stats.rows_looked_up
        refusals.update(stats.refused_calls)
        for name, histogram in stats.histograms.items():
            total[name].add(histogram)
    latencies = {name: _latency(total[name]) for name in SECONDS}
    return {"rows_looked_up": rows, "refused_calls": dict(refusals), "histograms": total, "latencies": latencies}


def _latency(histogram: Histogram) -> dict[str, float | None]:
    calls = sum(histogram.counts)
    return {
        "calls": calls,
        "mean_seconds": histogram.sum / calls if calls else None,
        "p95_seconds": histogram.quantile(0.95),
    }


def _tables(state: JobMachine) -> dict[str, TableSize]:
    """Table sizes of the servers that are up."""
    found: dict[str, TableSize] = {}
    for server in state.roster.up(Role.PS):
        stats = state.stats.get(server.id)
        for path, size in (stats.tables if stats is not None else {}).items():
            other = found.get(path, TableSize(0, 0))
            found[path] = TableSize(other.rows + size.rows, other.bytes + size.bytes)
    return found


def _counts(state: JobMachine, role: Role) -> ProcessCounts:
    roster = state.roster
    return ProcessCounts(
        planned=roster.size(role),
        up=len([1 for (of, _), place in roster.places().items() if of is role and place is PlaceState.UP]),
        lost=roster.losses.lost[role],
        replaced=roster.losses.replaced[role],
    )


def _process(state: JobMachine, role: Role, index: int, now: float) -> ProcessSnapshot:
    member, place = state.roster.at(role, index), state.roster.state(role, index)
    process = ProcessSnapshot(role=role.label, index=index, state=place.label)
    if member is None:
        return process
    separate = (member.pid, member.host) != (os.getpid(), host_name())  # else it is a thread of the master
    told = state.stats.get(member.id)
    stats = told if separate else None
    return replace(
        process,
        id=member.id,
        pid=member.pid,
        host=member.host,
        address=member.address,
        straggler=member.id in state.speeds.paces.stragglers,
        cpu_seconds=None if stats is None else stats.cpu_seconds,
        resident_bytes=None if stats is None else stats.resident_bytes or None,
        certificate_expires=0.0 if stats is None else stats.certificate_expires,
        tables={} if told is None else told.tables,
        **_pace(state, member.id, now),
    )


def _pace(state: JobMachine, worker: int, now: float) -> dict[str, Any]:
    rate, paces = state.speeds.batches_per_second(worker, now), state.speeds.paces
    if rate is None or state.settings is None:
        return {}
    return {
        "batches": paces.batches(worker),
        "records_per_second": rate * state.settings.training.minibatch_size,
        "seconds_per_batch": paces.of(worker),
    }
