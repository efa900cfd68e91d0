"""Carries out that a job is to have another number of parameter servers, when its state allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticcb.errors import ElasticCBError, JobFailedError, UsageError
from elasticcb.master.roster import Role
from elasticcb.settings import Command

if TYPE_CHECKING:
    from elasticcb.master.master import Master
    from elasticcb.master.servers import Servers

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_MOST_SERVERS = 256


@dataclass
class Wish:
    """That there be another number of parameter servers.

    Attributes:
        servers, before: how many there are to be, and were.
        attempts: that failed.
        waits_for: what has to come before it, in words; "": nothing.
        moved: what was done, in words; "" before.
        error: why it was not.
    """

    servers: int
    before: int
    attempts: int = 0
    waits_for: str = ""
    moved: str = ""
    error: str = ""

    @property
    def done(self) -> bool:
        return bool(self.moved or self.error)


class ServerScaling:
    """Takes wishes, one after another, and carries them out.

    Args:
        master: of the job.
    """

    def __init__(self, master: Master) -> None:
        self._master = master
        self._wish: Wish | None = None  # the last one

    def ask(self, servers: int, waiting: bool, seconds: float) -> Wish | None:
        """Asks for another number of parameter servers, and waits up to `seconds` for what comes of it.

        Args:
            waiting: it was asked for before.

        Returns None when there are as many already. Raises `UsageError` when the job can't have so many.
        """
        master = self._master
        with master.changed:
            wish = self._wish
            asked = wish is not None and not wish.done and wish.servers == servers
            if not waiting and not asked:
                before = self._check(servers)
                if servers == before:
                    return None
                wish = self._wish = Wish(servers, before)
                if servers > before:
                    master.processes.resize(Role.PS, servers)
                master.changed.notify_all()
            if wish is None:
                raise UsageError("Another master runs the job by now. Ask again.")
            asked_for = wish
            master.changed.wait_for(lambda: asked_for.done or master.closing, seconds)
            if master.closing and not wish.done:
                wish.error = "The job has ended before the servers could be moved."
            return wish

    def _check(self, servers: int) -> int:
        """How many there are. Raises `UsageError` when there can't be so many."""
        master = self._master
        if not 1 <= servers <= _MOST_SERVERS:
            raise UsageError(f"The job can't have {servers} parameter servers. Expected from 1 to {_MOST_SERVERS}.")
        if master.closing or master.over or master.queue is None or master.settings is None:
            raise UsageError(f"The job {'is starting' if master.queue is None else 'is over'}; it can't be scaled now.")
        if master.settings.command is not Command.TRAIN:
            raise UsageError("Only the parameter servers of a job that trains can become more or fewer.")
        if not master.settings.training.use_async:
            raise UsageError("In synchronous mode (--use_async=false) the number of parameter servers can't change.")
        if master.settings.cluster.ps_replicas:
            raise UsageError("With --ps_replicas the number of parameter servers can't change.")
        if self._wish is not None and not self._wish.done:
            raise UsageError(
                f"The job is on its way to {self._wish.servers} parameter servers. Wait until it is there."
            )
        return master.roster.size(Role.PS)

    def turn(self, servers: Servers, why_wait: str, why_not: Callable[[int], str]) -> None:
        """Does what was asked for, if something was, and it can be done now.

        Args:
            why_wait: what the job does that has to end before, in words; "": nothing.
            why_not: why the job can't have so many servers; "": it can.
        """
        master = self._master
        with master.changed:
            wish = self._wish
            if wish is None or wish.done:
                return
            refused = why_not(wish.servers)
            if refused:
                self._end(wish, error=refused)
                return
            ready = not master.lost_ps and master.roster.complete(Role.PS, master.job)
            wish.waits_for = why_wait or ("" if ready else "all parameter servers to be up")
            if wish.waits_for:
                return
        try:
            moved = servers.resize(wish.servers)
        except JobFailedError:
            raise
        except ElasticCBError as error:
            wish.attempts += 1
            logger.warning("The servers could not be moved: %s", error)
            if wish.attempts == _ATTEMPTS:
                with master.changed:
                    self._end(wish, error=f"The servers could not be moved: {error}")
            return
        with master.changed:
            self._end(wish, moved=str(moved))

    def _end(self, wish: Wish, moved: str = "", error: str = "") -> None:
        """What came of it. `changed` is held."""
        wish.moved, wish.error = moved, error
        self._master.say(moved or error)
        if error:
            self._master.processes.resize(Role.PS, wish.before)
        self._master.changed.notify_all()
