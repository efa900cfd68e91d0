"""Detects processes without heartbeats, and has them replaced.

It runs in its own thread: the driving thread may itself be waiting for such a process.
"""

from __future__ import annotations

import math
import threading
import time

from elasticcb.master.desk import Desk
from elasticcb.master.job_state import JobState
from elasticcb.master.members import Member, Role
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS

_LONGEST_PAUSE_SECONDS = 1.0  # between two checks
_ANSWER_SECONDS = 5.0  # for a server to answer
_DOUBT_PAUSE_SECONDS = 0.5  # before it is asked again


class Watchdog:
    """Kills processes that are silent for too long.

    A server, or a worker without an exit monitor, is considered lost after `silence_seconds`. A monitored worker has
    the time of a lease, because user code may block its heartbeat thread.

    Args:
        silence_seconds: timeout for heartbeats, which are sent every third of it.
        watched: whether the backend reports exited processes. Then processes may take long to get ready for the current
            job.
    """

    def __init__(self, desk: Desk, silence_seconds: float, watched: bool) -> None:
        self._desk = desk
        self._silence, self._watched = silence_seconds, watched
        self._looked = -math.inf
        self._doubted: set[int] = set()  # ids of servers being probed
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(min(_LONGEST_PAUSE_SECONDS, self._silence / 10)):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Replaces processes that are overdue at `now`, in seconds."""
        since, self._looked = now - self._looked, now
        with self._desk.state() as state:
            if since > self._silence / 2:  # this process itself was suspended, and received no heartbeats
                state.roster.forgive(now)
            if state.closing or state.over:
                return
            for role in Role:
                seconds = self._seconds(role, state)
                for member in state.roster.silent(now, seconds):
                    if member.role is role and (not self._watched or state.has(member.id)):
                        self._desk.replace(member, f"no heartbeat for {seconds:g} s")

    def _seconds(self, role: Role, state: JobState) -> float:
        settings = state.settings
        if role is Role.PS or not self._watched or settings is None:
            return self._silence
        return max(self._silence, settings.cluster.lease_seconds)

    def doubt(self, server: int) -> None:
        """Someone gets no answer from a server. It is replaced unless it answers the master."""
        with self._desk.state() as state:
            member = state.roster.member(server)
            if (
                self._thread.is_alive()
                and member is not None
                and member.role is Role.PS
                and server not in self._doubted
            ):
                self._doubted.add(server)
                threading.Thread(target=self._reach, args=(member,), name="doubt", daemon=True).start()

    def _reach(self, member: Member) -> None:
        begun = time.monotonic()
        connection = Connection(member.address, str(member), access=self._desk.access)
        answers = False
        while not answers and not self._stopped.is_set() and self._is_up(member):
            answers = connection.is_alive(PS_METHODS["Exchange"], _ANSWER_SECONDS)
            if not answers and time.monotonic() - begun >= self._silence:
                with self._desk.state() as state:
                    if self._is_up(member) and not state.closing:
                        self._desk.replace(member, f"unreachable for {self._silence:g} s")
                break
            self._stopped.wait(0.0 if answers else _DOUBT_PAUSE_SECONDS)
        connection.close()
        with self._desk.state():
            self._doubted.discard(member.id)

    def _is_up(self, member: Member) -> bool:
        with self._desk.state() as state:
            return state.roster.member(member.id) is not None
