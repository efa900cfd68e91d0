"""Applies the autoscaler's decisions, on the thread that drives the job."""

from __future__ import annotations

import time
from collections.abc import Callable

from elasticcb.master.autoscaler import Autoscaler, Sight
from elasticcb.master.desk import Desk
from elasticcb.master.job_state import JobState
from elasticcb.master.members import PlaceState, Role
from elasticcb.settings import WorkerRange


class Autoscaling:
    """Changes the number of workers of a training job."""

    def __init__(self, desk: Desk, limits: WorkerRange, records: int, say: Callable[[str], None]) -> None:
        self._desk, self._records, self._say = desk, records, say
        with desk.state() as state:
            state.autoscales = True
            workers = min(max(state.roster.size(Role.WORKER), limits.least), limits.most)
        self._scaler = Autoscaler(limits.least, limits.most, workers)

    def turn(self) -> None:
        """Observes the job, several times a second, and changes the number of workers when due."""
        with self._desk.state() as state:
            if not state.autoscales or state.queue is None or state.over:
                return
            before = state.roster.size(Role.WORKER)
            if any(state.roster.state(Role.WORKER, place) is PlaceState.GIVEN_UP for place in range(before)):
                state.end_autoscaling("a worker was lost and its restarts are used up")
                return
            scaling = self._scaler.observe(time.monotonic(), self._sight(state))
            workers = self._scaler.workers if scaling is None else scaling.workers
            if workers != before:
                self._desk.resize(Role.WORKER, workers)
        if scaling is not None:
            self._say(f"Autoscale: {scaling.reason}.")

    def _sight(self, state: JobState) -> Sight:
        queue = state.queue
        assert queue is not None
        trained = sum(queue.accounting.records_trained.values())
        return Sight(trained, self._records - trained, _is_busy(state))


def _is_busy(state: JobState) -> bool:
    workers = state.roster.up(Role.WORKER)
    return (
        len(workers) == state.roster.size(Role.WORKER)
        and state.rounds.running is None
        and not state.lost_ps
        and all(state.paces.knows(worker.id) for worker in workers)
        and not state.idle_workers()
    )
