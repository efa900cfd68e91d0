"""Changes the number of parameter servers on request, when the job's state allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from elasticcb.errors import ElasticCBError, JobFailedError, UsageError
from elasticcb.master.cluster_state import Wish
from elasticcb.master.desk import Desk
from elasticcb.master.job_state import JobState
from elasticcb.master.members import Role
from elasticcb.master.resharding import Moved
from elasticcb.process.wording import how_many
from elasticcb.settings import Command

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_MOST_SERVERS = 256


class ServerScaling:
    """Takes requests, one at a time, and carries them out."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def ask(self, servers: int, waiting: bool, seconds: float) -> Wish | None:
        """Requests a different number of parameter servers, and waits up to `seconds` for the result.

        Returns None when the number is already right. Raises `UsageError` when the job can't have it.
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
                raise UsageError("Another master took over the job. Try again.")
            asked_for = wish
            state = self._desk.wait_for(lambda state: asked_for.done or state.closing, seconds)
            if state.closing and not wish.done:
                wish.error = "The job ended before the number of parameter servers could change."
            return wish

    def turn(self, move: Callable[[int], Moved], why_wait: str, why_not: Callable[[int], str]) -> None:
        """Carries out a pending request, if possible now.

        Args:
            move: moves the model to another number of servers; `Servers.resize`.
            why_wait: what must finish first, as text; "": nothing.
            why_not: why the job can't have that number of servers; "": it can.
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
            logger.warning("The number of parameter servers could not change: %s", error)
            if wish.attempts == _ATTEMPTS:
                with self._desk.state() as state:
                    self._end(state, wish, error=f"The number of parameter servers could not change: {error}")
            return
        with self._desk.state() as state:
            self._end(state, wish, moved=str(moved))

    def _end(self, state: JobState, wish: Wish, moved: str = "", error: str = "") -> None:
        """Ends a request with its result."""
        wish.moved, wish.error = moved, error
        state.say(moved or error)
        if error:
            self._desk.resize(Role.PS, wish.before)
        state.wake()


def check_under_way(state: JobState) -> None:
    """Raises `UsageError` when the current job can't be scaled because it has not started or is over."""
    if state.closing or state.over:
        raise UsageError("The job is over and can't be scaled.")
    if state.queue is None or state.settings is None:
        raise UsageError("The job is starting and can't be scaled yet. Try again in a few seconds.")


def _check(state: JobState, servers: int) -> int:
    """The current number. Raises `UsageError` when `servers` is not possible."""
    if not 1 <= servers <= _MOST_SERVERS:
        raise UsageError(f"{servers} parameter servers is invalid: must be from 1 to {_MOST_SERVERS}.")
    check_under_way(state)
    assert state.settings is not None
    if state.settings.command is not Command.TRAIN:
        raise UsageError("Only training jobs can change the number of parameter servers.")
    if state.wish is not None and not state.wish.done:
        raise UsageError(
            f"The job is still changing to {how_many(state.wish.servers, 'parameter server')}. Try again later."
        )
    return state.roster.size(Role.PS)
