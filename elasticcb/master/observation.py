"""The present job at one moment, as machines see it: read under the master's lock, which is held for little more than
the copies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elasticcb.master.accounting import Accounting
from elasticcb.master.cluster_state import Recoveries, Totals
from elasticcb.master.job_state import JobState
from elasticcb.master.roster import Member, PlaceState, Role
from elasticcb.master.task import TaskState, TaskType
from elasticcb.process.host import host_name
from elasticcb.process.stats import Stats
from elasticcb.settings import JobSettings
from elasticcb.status import JobStatus


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """A place of the job, and the process in it.

    Attributes:
        member: None where no process is up.
        stats: what it said last of itself; None: nothing yet, or it is a thread of the master's process.
        straggles: it is a worker that is much slower than the others.
    """

    role: Role
    index: int
    state: PlaceState
    member: Member | None
    stats: Stats | None
    straggles: bool


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the master knows.

    Attributes:
        status: as people see it; None before there is a job.
        tasks: how many there are by type and state; empty before there is a queue.
        ready: the servers hold the model, and tasks are handed out.
        restoring: parameter servers that were lost, in whose places no other holds the model yet.
        records_per_epoch: of training.
        planned: processes that there are to be.
        lost, replaced: processes, over the whole job.
        stats: of all processes that have ever been.
        refused_calls: by the master, by reason in words.
    """

    settings: JobSettings | None
    status: JobStatus | None
    tasks: Mapping[TaskType, Mapping[TaskState, int]]
    ready: bool
    restoring: int
    accounting: Accounting
    records_per_epoch: int
    totals: Totals
    recoveries: Recoveries
    planned: Mapping[Role, int]
    lost: Mapping[Role, int]
    replaced: Mapping[Role, int]
    places: Sequence[ProcessPlace]
    stats: Sequence[Stats]
    refused_calls: Mapping[str, int]

    def added_up(self) -> Stats:
        """What all processes have counted together, refused calls of the master included, without time and memory."""
        total, refused = Stats(), Counter(self.refused_calls)
        for stats in self.stats:
            total.rows_looked_up += stats.rows_looked_up
            refused.update(stats.refused_calls)
            for name, histogram in stats.histograms.items():
                total.histograms[name].add(histogram)
        return replace(total, refused_calls=dict(refused))


def observe(state: JobState, refused: Mapping[str, int], now: float) -> Observation:
    """A job as it is `now`, in seconds.

    Args:
        refused: calls by the master, by reason in words.
    """
    own = os.getpid(), host_name()
    queue, roster = state.queue, state.roster

    def place(role: Role, index: int, place_state: PlaceState) -> ProcessPlace:
        member = roster.at(role, index)
        separate = member is not None and (member.pid, member.host) != own
        return ProcessPlace(
            role=role,
            index=index,
            state=place_state,
            member=member,
            stats=state.crew.stats.get(member.id) if member is not None and separate else None,
            straggles=member is not None and member.id in state.paces.stragglers,
        )

    return Observation(
        settings=state.settings,
        status=None if state.describe is None else state.describe(state, now),
        tasks={} if queue is None else queue.counts(),
        ready=state.ready,
        restoring=len(state.lost_ps),
        accounting=Accounting() if queue is None else queue.accounting,
        records_per_epoch=0 if queue is None else queue.records_per_epoch,
        totals=replace(state.totals),
        recoveries=replace(state.recoveries),
        planned={role: roster.size(role) for role in Role},
        lost={role: roster.lost_count(role) for role in Role},
        replaced={role: roster.replaced_count(role) for role in Role},
        places=[place(role, index, there) for (role, index), there in roster.places().items()],
        stats=[*state.crew.stats.values()],
        refused_calls=refused,
    )
