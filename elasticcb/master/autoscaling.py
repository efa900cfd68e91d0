"""Carries out what the autoscaler decides, for the thread that drives the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from elasticcb.master.autoscaler import Autoscaler, Sight
from elasticcb.master.master import Master
from elasticcb.master.roster import PlaceState, Role
from elasticcb.settings import WorkerRange

logger = logging.getLogger(__name__)


class Autoscaling:
    """Changes the number of workers of a training job.

    Args:
        master: the job's state.
        limits: of the number of workers.
        records: to train in all.
        say: shows a line to the user.
    """

    def __init__(self, master: Master, limits: WorkerRange, records: int, say: Callable[[str], None]) -> None:
        self._master, self._records, self._say = master, records, say
        workers = min(max(master.roster.size(Role.WORKER), limits.least), limits.most)
        self._scaler = Autoscaler(limits.least, limits.most, workers)

    def turn(self) -> None:
        """Looks at the job, some times a second, and changes the number of workers when that is due."""
        master = self._master
        with master.changed:
            if not master.autoscales or master.queue is None or master.over:
                return
            before = master.roster.size(Role.WORKER)
            if any(master.roster.state(Role.WORKER, place) is PlaceState.GIVEN_UP for place in range(before)):
                master.end_autoscaling("a worker is lost for good")
                return
            scaling = self._scaler.observe(time.monotonic(), self._sight())
            workers = self._scaler.workers if scaling is None else scaling.workers
            if workers != before:
                master.resize(workers)
        if scaling is not None:
            self._say(f"Autoscale: {scaling.reason}.")

    def _sight(self) -> Sight:
        master = self._master
        queue = master.queue
        assert queue is not None
        trained = sum(queue.accounting.records_trained.values())
        return Sight(trained, self._records - trained, self._is_busy())

    def _is_busy(self) -> bool:
        master = self._master
        workers = master.roster.up(Role.WORKER)
        return (
            len(workers) == master.roster.size(Role.WORKER)
            and master.rounds.running is None
            and not master.lost_ps
            and all(master.paces.knows(worker.id) for worker in workers)
            and not master.idle_workers()
        )
