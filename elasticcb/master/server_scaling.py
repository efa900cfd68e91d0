"""Carries out that a job is to have another number of parameter servers, when its state allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from elasticcb.errors import ElasticCBError, JobFailedError, UsageError
from elasticcb.master.cluster_state import Wish
from elasticcb.master.desk import Desk
from elasticcb.master.job_state import JobState
from elasticcb.master.members import Role
from elasticcb.master.resharding import Moved
from elasticcb.settings import Command

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_MOST_SERVERS = 256


class ServerScaling:
    """Takes wishes, one after another, and carries them out.

    Args:
        desk: of the job.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def ask(self, servers: int, waiting: bool, seconds: float) -> Wish | None:
        """Asks for another number of parameter servers, and waits up to `seconds` for what comes of it.

        Args:
            waiting: it was asked for before.

        Returns None when there are as many already. Raises `UsageError` when the job can't have so many.
        """
        with self._desk.state() as state:
            wish = state.wish
            asked = wish is not None and not wish.done and wish.servers == servers
            if not waiting and not asked:
                before = _check(state, servers)
                if servers == before:
                    return None
                wish = state.wish = Wish(servers, before)
                if servers > before:
                    self._desk.resize(Role.PS, servers)
                state.wake()
            if wish is None:
                raise UsageError("Another master runs the job by now. Ask again.")
            asked_for = wish
            state = self._desk.wait_for(lambda state: asked_for.done or state.closing, seconds)
            if state.closing and not wish.done:
                wish.error = "The job has ended before the servers could be moved."
            return wish

    def turn(self, move: Callable[[int], Moved], why_wait: str, why_not: Callable[[int], str]) -> None:
        """Does what was asked for, if something was, and it can be done now.

        Args:
            move: has the model on another number of servers; `Servers.resize`.
            why_wait: what the job does that has to end before, in words; "": nothing.
            why_not: why the job can't have so many servers; "": it can.
        """
        with self._desk.state() as state:
            wish = state.wish
            if wish is None or wish.done:
                return
            refused = why_not(wish.servers)
            if refused:
                self._end(state, wish, error=refused)
                return
            ready = not state.lost_ps and state.roster.complete(Role.PS, state.number)
            wish.waits_for = why_wait or ("" if ready else "all parameter servers to be up")
            if wish.waits_for:
                return
        try:
            moved = move(wish.servers)
        except JobFailedError:
            raise
        except ElasticCBError as error:
            wish.attempts += 1
            logger.warning("The servers could not be moved: %s", error)
            if wish.attempts == _ATTEMPTS:
                with self._desk.state() as state:
                    self._end(state, wish, error=f"The servers could not be moved: {error}")
            return
        with self._desk.state() as state:
            self._end(state, wish, moved=str(moved))

    def _end(self, state: JobState, wish: Wish, moved: str = "", error: str = "") -> None:
        """What came of it."""
        wish.moved, wish.error = moved, error
        state.say(moved or error)
        if error:
            self._desk.resize(Role.PS, wish.before)
        state.wake()


def check_under_way(state: JobState) -> None:
    """Raises `UsageError` when the present job can't be scaled, since it has not begun or is over."""
    if state.closing or state.over:
        raise UsageError("The job is over; it can't be scaled.")
    if state.queue is None or state.settings is None:
        raise UsageError("The job is starting, and can't be scaled yet. Try again in some seconds.")


def _check(state: JobState, servers: int) -> int:
    """How many there are. Raises `UsageError` when there can't be so many."""
    if not 1 <= servers <= _MOST_SERVERS:
        raise UsageError(f"The job can't have {servers} parameter servers. Expected from 1 to {_MOST_SERVERS}.")
    check_under_way(state)
    assert state.settings is not None
    if state.settings.command is not Command.TRAIN:
        raise UsageError("Only the parameter servers of a job that trains can become more or fewer.")
    if state.settings.training.is_synchronous:
        raise UsageError("In synchronous mode (--updates=sync) the number of parameter servers can't change.")
    if state.settings.cluster.ps_replicas:
        raise UsageError("With --ps_replicas the number of parameter servers can't change.")
    if state.wish is not None and not state.wish.done:
        raise UsageError(f"The job is on its way to {state.wish.servers} parameter servers. Wait until it is there.")
    return state.roster.size(Role.PS)
