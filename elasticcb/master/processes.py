"""The processes of the job: what the roster plans, the backend carries out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from elasticcb.cluster.base import ClusterBackend, Exit
from elasticcb.errors import ClusterLostError, JobFailedError, LostServerError
from elasticcb.master.losses import Consequence, LossDecision
from elasticcb.master.members import Member, Role
from elasticcb.master.roster import Roster

logger = logging.getLogger(__name__)


class Processes:
    """Starts what the roster misses, and tells the roster what ended. Not thread-safe.

    Args:
        roster: the plan.
        backend: carries it out.
        on_worker_lost: called with the id of a worker whose leases must go back.
        on_ps_lost: called with the place of a server that is replaced.
        say: shows a line to the user.
    """

    def __init__(
        self,
        roster: Roster,
        backend: ClusterBackend,
        on_worker_lost: Callable[[int], None],
        on_ps_lost: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        self._roster = roster
        self._backend = backend
        self._on_worker_lost, self._on_ps_lost = on_worker_lost, on_ps_lost
        self._say = say
        self._left_behind: set[tuple[Role, int]] = set()  # by another master, and unknown to it
        self._told_pending: dict[str, str] = {}  # by reason, which processes wait

    def start_missing(self, master_address: str) -> None:
        """Asks the backend for a process in every place that has none."""
        for role, index in self._roster.to_start():
            self._roster.requested(role, index)
            self._left_behind.discard((role, index))
            self._backend.start(role.label, index, master_address)

    def take_over(self, running: Mapping[tuple[str, int], int | str]) -> None:
        """Compares the roster of another master, which was killed, with what runs, as `ClusterBackend.taken_over` says.

        Raises `JobFailedError` when the job can't go on without one of those that ended meanwhile.
        """
        for role in Role:
            for member in self._roster.up(role):
                if running.get((role.label, member.index)) not in (member.pid, member.host):
                    self.lost(member.id, "it ended while there was no master")
        for role, index in self._roster.to_start():
            if (role.label, index) in running:  # it has not registered yet, or was given up
                self._roster.requested(role, index)
                self._left_behind.add((role, index))

    def check(self) -> None:
        """Looks for processes that ended.

        Raises `JobFailedError` when the job can't go on without one of them.
        """
        for exit in self._backend.poll():
            self._ended(exit)
        self._tell_pending()

    def note_ended(self) -> None:
        """The job is over: those that ended are gone, and nobody takes their places."""
        for exit in self._backend.poll():
            member = self._roster.at(Role.of(exit.role), exit.index)
            if member is not None:
                self._roster.lost(member.id, exit.reason)
                logger.warning("%s ended after its last task, without a goodbye: %s", member, exit.reason)

    def replace(self, member: Member, reason: str) -> None:
        """Ends a process that hangs; another takes its place. Raises `JobFailedError` when none can."""
        self._backend.kill(member.role.label, member.index)
        self.lost(member.id, reason)

    def where(self, worker: int) -> str:
        """What a person needs to find the log of a worker."""
        member = self._roster.find(worker)
        if member is None:
            return ""
        place = f"in place {member.index} (log: worker-{member.index}.log)"
        return f"Worker {worker} was process {member.pid} on {member.host}, {place}."

    def lost(self, id: int, reason: str) -> None:
        """A member is gone. Raises `JobFailedError` when the job can't go on without it."""
        member = self._roster.member(id)
        if member is None:
            return
        self._act(self._roster.lost(id, reason), member.id if member.role is Role.WORKER else None)

    def asked_to_end(self, member: Member, reason: str) -> None:
        """A process has put down its work, since somebody wants its machine; another is to take its place.

        Raises `JobFailedError` when none can.
        """
        decision = self._roster.asked_to_end(member.id, reason)
        if decision.kind is Consequence.IGNORE:
            logger.info("%s", decision.reason)
        else:
            self._act(decision, None)

    def resize(self, role: Role, size: int) -> None:
        """Has another number of workers, or of parameter servers, from now on."""
        for index in self._roster.resize(role, size):
            if self._backend.watches:  # else it is refused when it comes
                self._backend.kill(role.label, index)

    def _ended(self, exit: Exit) -> None:
        role = Role.of(exit.role)
        member = self._roster.at(role, exit.index)
        place = role, exit.index
        if exit.failed and self._roster.is_requested(*place) and place not in self._left_behind:
            # It failed by its own code before it could register; another one would fail the same way.
            raise JobFailedError(
                f"{role.value} {exit.index} could not start ({exit.reason}).{self._last_words(role, exit.index)}"
            )
        decision = self._roster.place_lost(role, exit.index, exit.reason, exit.taken_away)
        self._act(decision, member.id if member is not None and role is Role.WORKER else None)

    def _tell_pending(self) -> None:
        """Says which processes wait, and why, when that has changed."""
        waiting: dict[str, list[str]] = {}
        for (role, index), reason in sorted(self._backend.pending().items()):
            waiting.setdefault(reason, []).append(f"{Role.of(role).value} {index}")
        told = {reason: ", ".join(names) for reason, names in waiting.items()}
        for reason, names in told.items():
            if self._told_pending.get(reason) != names:
                self._say(f"Not started yet: {names} ({reason}).")
        self._told_pending = told

    def _act(self, decision: LossDecision, worker: int | None) -> None:
        if worker is not None:
            self._on_worker_lost(worker)
        if decision.kind is Consequence.IGNORE and worker is None:
            logger.debug("%s", decision.reason)
            return
        if decision.kind is Consequence.FAIL:
            resumable = decision.role is Role.PS and not self._roster.losses.recovers_ps
            kind = LostServerError if resumable else ClusterLostError
            raise kind(decision.reason + "." + self._last_words(decision.role, decision.index))
        if decision.role is Role.PS:
            self._on_ps_lost(decision.index)
        logger.info("%s", decision.reason)
        self._say(decision.reason)

    def _last_words(self, role: Role, index: int) -> str:
        tail = self._backend.log_tail(role.label, index)
        return f"\nThe last lines of its log:\n{tail}" if tail else ""
