"""Misses processes that are not heard of any more, and has others take their places.

In a thread of its own: the one that drives the job may itself wait for an answer of such a process.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from elasticcb.clients.ps_link import SERVICE
from elasticcb.errors import JobFailedError
from elasticcb.master.roster import Member, Role
from elasticcb.rpc.calls import Connection

if TYPE_CHECKING:
    from elasticcb.master.master import Master

_LONGEST_PAUSE_SECONDS = 1.0  # between two looks
_ANSWER_SECONDS = 5.0  # for a server to say that it is alive
_DOUBT_PAUSE_SECONDS = 0.5  # before it is asked again


class Watchdog:
    """Ends processes that are silent for too long.

    A server is missed after `silence_seconds`, and so is a worker that nobody else watches. One that is watched has
    the time of a lease, however long the user's code keeps its threads from running.

    Args:
        master: whose processes these are.
        silence_seconds: of processes; they give a sign of life after a third of it.
        watched: whether the backend tells of those that end. What they do before they are ready for the present job
            may take long then.
    """

    def __init__(self, master: Master, silence_seconds: float, watched: bool) -> None:
        self._master = master
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
            with self._master.changed:
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Replaces who is missed at `now`, in seconds. Hold `changed`."""
        master = self._master
        since, self._looked = now - self._looked, now
        if since > self._silence / 2:  # this process was stopped itself, and has heard nobody
            master.roster.forgive(now)
        if master.closing or master.over:
            return
        for role in Role:
            seconds = self._seconds(role)
            for member in master.roster.silent(now, seconds):
                if member.role is role and (not self._watched or master.roster.job_of(member.id) == master.job):
                    self._replace(member, f"silent for {seconds:g} s")

    def _seconds(self, role: Role) -> float:
        settings = self._master.settings
        if role is Role.PS or not self._watched or settings is None:
            return self._silence
        return max(self._silence, settings.cluster.lease_seconds)

    def doubt(self, server: int) -> None:
        """A server does not answer somebody. It is replaced, unless it answers the master."""
        with self._master.changed:
            member = self._master.roster.member(server)
            if (
                self._thread.is_alive()
                and member is not None
                and member.role is Role.PS
                and server not in self._doubted
            ):
                self._doubted.add(server)
                threading.Thread(target=self._reach, args=(member,), name="doubt", daemon=True).start()

    def _reach(self, member: Member) -> None:
        master, begun = self._master, time.monotonic()
        connection = Connection(member.address, str(member), access=master.access)
        answers = False
        while not answers and not self._stopped.is_set() and master.roster.member(member.id) is not None:
            answers = connection.is_alive(SERVICE, _ANSWER_SECONDS)
            if not answers and time.monotonic() - begun >= self._silence:
                with master.changed:
                    if master.roster.member(member.id) is not None and not master.closing:
                        self._replace(member, f"out of reach for {self._silence:g} s")
                break
            self._stopped.wait(0.0 if answers else _DOUBT_PAUSE_SECONDS)
        connection.close()
        with master.changed:
            self._doubted.discard(member.id)

    def _replace(self, member: Member, reason: str) -> None:
        try:
            self._master.processes.replace(member, reason)
        except JobFailedError as failure:
            self._master.error = failure
        self._master.changed.notify_all()
