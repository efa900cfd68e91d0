"""What `elasticcb status --json` shows: the job's state as a document. docs/operations.md lists its keys."""

from __future__ import annotations

import math
from typing import Any

from elasticcb.errors import JobInterrupted
from elasticcb.master.observation import Observation, ProcessPlace
from elasticcb.master.roster import PlaceState, Role
from elasticcb.master.task import TaskState


def document(seen: Observation, error: BaseException | None = None, over: bool = False) -> dict[str, Any]:
    """The state as JSON values.

    Args:
        over: the job has ended.
        error: by which it did; None: it has done what it should.
    """
    status, settings, accounting = seen.status, seen.settings, seen.accounting
    total = seen.added_up()
    tasks = {state.value.lower(): sum(states.get(state, 0) for states in seen.tasks.values()) for state in TaskState}
    return {
        "name": "" if settings is None else settings.name,
        "command": "" if settings is None else settings.command.value,
        "directory": "" if settings is None else settings.directory,
        "phase": _end(error) if over else ("starting" if status is None else status.phase),
        "conditions": _conditions(seen, error, over),
        "epoch": 0 if status is None else status.epoch,
        "epochs": 0 if status is None else status.epochs,
        "version": 0 if status is None else status.version,
        "loss": None if status is None else _number(status.loss),
        "metrics": {} if status is None else {name: _number(value) for name, value in status.metrics.items()},
        "seconds_left": None if status is None or over else _number(status.seconds_left),
        "records": {
            "trained": sum(accounting.records_trained.values()),
            "planned": 0 if status is None else status.records_total,
            "per_second": 0.0 if status is None or over else status.records_per_second,
            "repeated": accounting.records_repeated,
            "evaluated": 0 if status is None else status.records_evaluated,
            "predicted": 0 if status is None else status.records_predicted,
            "looked_up_rows": total.rows_looked_up,
        },
        "tasks": {
            **tasks,
            "taken_over": accounting.tasks_taken_over,
            "retried": accounting.tasks_retried,
            "split": accounting.tasks_split,
        },
        "workers": {
            **_counts(seen, Role.WORKER),
            "stragglers": [place.index for place in seen.places if place.straggles],
        },
        "parameter_servers": {
            **_counts(seen, Role.PS),
            "restoring": seen.restoring,
            "longest_recovery_seconds": max(seen.recoveries.seconds, default=0.0),
            "updates_lost": seen.recoveries.updates_lost,
        },
        "processes": [_process(place) for place in seen.places],
        "gradients_rejected": seen.totals.gradients_rejected,
        "batches_skipped": seen.totals.batches_skipped,
        "callback_errors": seen.totals.callback_errors,
        "checkpoints_failed": seen.totals.checkpoints_failed,
        "refused_calls": dict(total.refused_calls),
        "error": "" if error is None else str(error),
    }


def _end(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return "interrupted" if isinstance(error, (JobInterrupted, KeyboardInterrupt)) else "failed"


def _conditions(seen: Observation, error: BaseException | None, over: bool) -> list[dict[str, str]]:
    """As those of objects of Kubernetes."""
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


def _troubles(seen: Observation) -> list[str]:
    counts = {
        "workers missing": seen.planned[Role.WORKER] - _up(seen, Role.WORKER),
        "parameter servers missing": seen.planned[Role.PS] - _up(seen, Role.PS),
        "parameter servers restoring": seen.restoring,
        "workers straggling": sum(place.straggles for place in seen.places),
    }
    return [f"{what}: {count}" for what, count in counts.items() if count > 0]


def _up(seen: Observation, role: Role) -> int:
    return len([place for place in seen.places if place.role is role and place.state is PlaceState.UP])


def _counts(seen: Observation, role: Role) -> dict[str, int]:
    lost, replaced = seen.lost[role], seen.replaced[role]
    return {"planned": seen.planned[role], "up": _up(seen, role), "lost": lost, "replaced": replaced}


def _process(place: ProcessPlace) -> dict[str, Any]:
    member, stats = place.member, place.stats
    return {
        "role": place.role.name.lower(),
        "index": place.index,
        "state": place.state.value.replace(" ", "_"),
        "id": None if member is None else member.id,
        "pid": None if member is None else member.pid,
        "host": None if member is None else member.host,
        "address": None if member is None else member.address,
        "straggler": place.straggles,
        "cpu_seconds": None if stats is None else stats.cpu_seconds,
        "resident_bytes": None if stats is None else stats.resident_bytes or None,
    }


def _number(value: Any) -> float | None:
    """A number that JSON has."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
