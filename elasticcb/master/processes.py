"""The processes of the job: the backend carries out the roster's plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from elasticcb.cluster.base import ClusterBackend, Exit
from elasticcb.errors import ClusterLostError, JobFailedError, LostServerError
from elasticcb.master.members import Member, Role
from elasticcb.master.roster import Consequence, LossDecision, Roster

logger = logging.getLogger(__name__)


class Processes:
    """Starts missing processes, and reports exited ones to the roster. Not thread-safe."""

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
        self._left_behind: set[tuple[Role, int]] = set()  # started by another master, not registered yet
        self._told_pending: dict[str, str] = {}  # by reason, names of waiting processes as last reported

    def start_missing(self, master_address: str) -> None:
        """Requests a process from the backend for every empty slot."""
        for role, index in self._roster.to_start():
            self._roster.requested(role, index)
            self._left_behind.discard((role, index))
            self._backend.start(role.label, index, master_address)

    def take_over(self, running: Mapping[tuple[str, int], int | str]) -> None:
        """Compares a killed master's roster with the processes that still run, as in `ClusterBackend.taken_over`.

        Raises `JobFailedError` when the job can't continue without one that exited in the meantime.
        """
        for role in Role:
            for member in self._roster.up(role):
                if running.get((role.label, member.index)) not in (member.pid, member.host):
                    self.lost(member.id, "it exited while there was no master")
        for role, index in self._roster.to_start():
            if (role.label, index) in running:  # not registered yet, or given up
                self._roster.requested(role, index)
                self._left_behind.add((role, index))

    def check(self) -> None:
        """Checks for exited processes.

        Raises `JobFailedError` when the job can't continue without one of them.
        """
        for exit in self._backend.poll():
            self._ended(exit)
        self._tell_pending()

    def note_ended(self) -> None:
        """The job is over: exited processes are not replaced."""
        for exit in self._backend.poll():
            member = self._roster.at(Role.of(exit.role), exit.index)
            if member is not None:
                self._roster.lost(member.id, exit.reason)
                logger.warning("%s exited after its last task without deregistering: %s", member, exit.reason)

    def replace(self, member: Member, reason: str) -> None:
        """Kills a hung process; another replaces it. Raises `JobFailedError` when none can."""
        self._backend.kill(member.role.label, member.index)
        self.lost(member.id, reason)

    def where(self, worker: int) -> str:
        """Where to find the log of a worker, as text."""
        member = self._roster.find(worker)
        if member is None:
            return ""
        place = f"index {member.index} (log: worker-{member.index}.log)"
        return f"Worker {worker} was process {member.pid} on {member.host}, {place}."

    def lost(self, id: int, reason: str) -> None:
        """A member is lost. Raises `JobFailedError` when the job can't continue without it."""
        member = self._roster.member(id)
        if member is None:
            return
        self._act(self._roster.lost(id, reason), member.id if member.role is Role.WORKER else None)

    def asked_to_end(self, member: Member, reason: str) -> None:
        """A process stopped because its machine is needed elsewhere; another replaces it.

        Raises `JobFailedError` when none can.
        """
        decision = self._roster.asked_to_end(member.id, reason)
        if decision.kind is Consequence.IGNORE:
            logger.info("%s", decision.reason)
        else:
            self._act(decision, None)

    def resize(self, role: Role, size: int) -> None:
        """Changes the number of workers or parameter servers."""
        for index in self._roster.resize(role, size):
            if self._backend.watches:  # else it is refused when it registers
                self._backend.kill(role.label, index)

    def _ended(self, exit: Exit) -> None:
        role = Role.of(exit.role)
        member = self._roster.at(role, exit.index)
        place = role, exit.index
        if exit.failed and self._roster.is_requested(*place) and place not in self._left_behind:
            # It failed by itself before it could register; a replacement would fail the same way.
            raise JobFailedError(
                f"{role.value} {exit.index} could not start ({exit.reason}).{self._last_words(role, exit.index)}"
            )
        decision = self._roster.place_lost(role, exit.index, exit.reason, exit.taken_away)
        self._act(decision, member.id if member is not None and role is Role.WORKER else None)

    def _tell_pending(self) -> None:
        """Reports which processes wait, and why, when that changes."""
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
