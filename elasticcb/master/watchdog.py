"""Misses processes that are not heard of any more, and has others take their places.

In a thread of its own: the one that drives the job may itself wait for an answer of such a process.
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

_LONGEST_PAUSE_SECONDS = 1.0  # between two looks
_ANSWER_SECONDS = 5.0  # for a server to say that it is alive
_DOUBT_PAUSE_SECONDS = 0.5  # before it is asked again


class Watchdog:
    """Ends processes that are silent for too long.

    A server is missed after `silence_seconds`, and so is a worker that nobody else watches. One that is watched has
    the time of a lease, however long the user's code keeps its threads from running.

    Args:
        desk: whose processes these are.
        silence_seconds: of processes; they give a sign of life after a third of it.
        watched: whether the backend tells of those that end. What they do before they are ready for the present job
            may take long then.
    """

    def __init__(self, desk: Desk, silence_seconds: float, watched: bool) -> None:
        self._desk = desk
        self._silence, self._watched = silence_seconds, watched
        self._looked = -math.inf
        self._doubted: set[int] = set()  # ids of servers that the master tries to reach
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
        """Replaces who is missed at `now`, in seconds."""
        since, self._looked = now - self._looked, now
        with self._desk.state() as state:
            if since > self._silence / 2:  # this process was stopped itself, and has heard nobody
                state.roster.forgive(now)
            if state.closing or state.over:
                return
            for role in Role:
                seconds = self._seconds(role, state)
                for member in state.roster.silent(now, seconds):
                    if member.role is role and (not self._watched or state.has(member.id)):
                        self._desk.replace(member, f"silent for {seconds:g} s")

    def _seconds(self, role: Role, state: JobState) -> float:
        settings = state.settings
        if role is Role.PS or not self._watched or settings is None:
            return self._silence
        return max(self._silence, settings.cluster.lease_seconds)

    def doubt(self, server: int) -> None:
        """A server does not answer somebody. It is replaced, unless it answers the master."""
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
                        self._desk.replace(member, f"out of reach for {self._silence:g} s")
                break
            self._stopped.wait(0.0 if answers else _DOUBT_PAUSE_SECONDS)
        connection.close()
        with self._desk.state():
            self._doubted.discard(member.id)

    def _is_up(self, member: Member) -> bool:
        with self._desk.state() as state:
            return state.roster.member(member.id) is not None
