"""The document behind `elasticcb status --json`. docs/operations.md lists its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from elasticcb.clients.history import finite
from elasticcb.errors import JobInterrupted
from elasticcb.master.snapshot import JobSnapshot, ProcessSnapshot
from elasticcb.master.task import TaskState
from elasticcb.process.stats import SECONDS, Histogram, TableSize


def document(seen: JobSnapshot, error: BaseException | None = None, over: bool = False) -> dict[str, Any]:
    """The state as JSON values.

    Args:
        over: the job has ended.
        error: the error that ended it; None: it succeeded.
    """
    return {
        "name": seen.name,
        "command": "" if seen.command is None else seen.command.value,
        "directory": seen.directory,
        "phase": _end(error) if over else seen.phase,
        "conditions": _conditions(seen, error, over),
        "epoch": seen.epoch,
        "epochs": seen.epochs,
        "version": seen.version,
        "loss": finite(seen.loss),
        "metrics": {name: finite(value) for name, value in seen.metrics.items()},
        "seconds_left": None if over else finite(seen.seconds_left),
        "records": {
            "trained": seen.records_trained,
            "planned": seen.records_total,
            "per_second": 0.0 if over else seen.records_per_second,
            "repeated": seen.records_repeated,
            "evaluated": seen.records_evaluated,
            "predicted": seen.records_predicted,
            "looked_up_rows": seen.rows_looked_up,
        },
        "tasks": {
            **{state.value.lower(): seen.tasks_by_state[state.value.lower()] for state in TaskState},
            "taken_over": seen.tasks_taken_over,
            "retried": seen.tasks_retried,
            "split": seen.tasks_split,
        },
        "workers": {**asdict(seen.workers), "stragglers": list(seen.stragglers)},
        "parameter_servers": {
            **asdict(seen.servers),
            "restoring": seen.servers_restoring,
            "longest_recovery_seconds": seen.longest_server_recovery,
            "updates_lost": seen.updates_lost,
        },
        "processes": [_process(process) for process in seen.processes],
        "tables": _tables(seen.tables),
        "latencies": {name: _latency(seen.histograms[name]) for name in SECONDS if name in seen.histograms},
        "batches_skipped": seen.batches_skipped,
        "callback_errors": seen.callback_errors,
        "checkpoints_failed": seen.checkpoints_failed,
        "checkpoint_age_seconds": None if over else seen.checkpoint_age,
        "recovery_files_failed": seen.recovery_files_failed,
        "free_disk_bytes": dict(seen.free_disk_bytes),
        "refused_calls": dict(seen.refused_calls),
        "error": "" if error is None else str(error),
    }


def _end(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return "interrupted" if isinstance(error, (JobInterrupted, KeyboardInterrupt)) else "failed"


def _conditions(seen: JobSnapshot, error: BaseException | None, over: bool) -> list[dict[str, str]]:
    """In the form of Kubernetes conditions."""
    ready = seen.ready and not over
    troubles = _troubles(seen) if ready else []
    what = str(error).partition("\n")[0] if error else ""

    def condition(kind: str, holds: bool, reason: str, message: str = "") -> dict[str, str]:
        return {"type": kind, "status": str(holds), "reason": reason, "message": message}

    return [
        condition("Ready", ready, "TasksAreHandedOut" if ready else "JobIsOver" if over else "JobStarts"),
        condition("Degraded", bool(troubles), "Processes" if troubles else "AsExpected", ", ".join(troubles)),
        condition("Complete", over and error is None, "JobIsOver" if over else "JobRuns"),
        condition("Failed", error is not None, type(error).__name__ if error else "NoError", what),
    ]


def _troubles(seen: JobSnapshot) -> list[str]:
    counts = {
        "workers missing": seen.workers.planned - seen.workers.up,
        "parameter servers missing": seen.servers.planned - seen.servers.up,
        "parameter servers restoring": seen.servers_restoring,
        "workers straggling": len(seen.stragglers),
    }
    return [f"{what}: {count}" for what, count in counts.items() if count > 0]


def _process(process: ProcessSnapshot) -> dict[str, Any]:
    return {**asdict(process), "tables": _tables(process.tables)}


def _tables(tables: Mapping[str, TableSize]) -> dict[str, dict[str, int]]:
    return {path: {"rows": size.rows, "bytes": size.bytes} for path, size in tables.items()}


def _latency(histogram: Histogram) -> dict[str, Any]:
    calls = sum(histogram.counts)
    return {
        "calls": calls,
        "mean_seconds": histogram.sum / calls if calls else None,
        "p95_seconds": histogram.quantile(0.95),
    }
