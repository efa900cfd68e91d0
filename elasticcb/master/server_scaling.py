"""Changes the number of parameter servers on request, when the job's state allows it, in a short pause in which servers
read each other's files.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticcb.clients.ps_servers import Link
from elasticcb.errors import ElasticCBError, JobFailedError, UsageError
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.master_server import MasterServer
from elasticcb.master.members import Role, Wish
from elasticcb.master.ps_admin import PSControl
from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame
from elasticcb.settings import Command

_DRAIN_SECONDS = 10.0  # for a worker to finish a push that some servers have applied
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Moved:
    """Result of a change.

    Attributes:
        seconds: without updates.
    """

    servers: int
    before: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"The job now has {how_many(self.servers, 'parameter server')} (was {self.before}). Updates paused for "
            f"{self.seconds:.1f} s."
        )


class Pause:
    """Keeps the present servers from changing the model, which is then in their recovery files.

    Args:
        is_up: whether a worker, by id, may still finish a push.
    """

    def __init__(self, control: PSControl, is_up: Callable[[int], bool]) -> None:
        self._control, self._is_up = control, is_up
        self.begun = time.monotonic()

    def begin(self) -> None:
        """Raises `ElasticCBError` when a server is lost or a worker does not finish its push; then call `end_pause`."""
        self._close()
        self._control.persist(lambda server, request: self._call(server.link, "Save", request))

    def _close(self) -> None:
        """Each push that one server has applied is applied by all."""
        taken: dict[int, int] = {}
        for answer in self._on_all("Move", pb.MoveRequest(step=pb.CLOSE)):
            for push in answer.pushes:
                taken[push.worker_id] = max(push.sequence, taken.get(push.worker_id, 0))
        give_up = time.monotonic() + _DRAIN_SECONDS
        while True:
            answers = self._on_all("Move", pb.MoveRequest(step=pb.DRAIN, pushes=_names(taken)))
            missing = {push.worker_id for answer in answers for push in answer.pushes if self._is_up(push.worker_id)}
            if not missing:
                return
            if time.monotonic() > give_up:
                raise ElasticCBError(
                    f"Worker {min(missing)} did not finish a push that some servers had already applied within "
                    f"{_DRAIN_SECONDS:.0f} s."
                )
            time.sleep(_PAUSE_SECONDS)

    def _on_all(self, method: str, header: Any) -> list[Any]:
        """The answers of all servers, by index. It does not wait for the replacement of a lost one."""
        servers = self._control.servers
        return servers.each(lambda link: self._call(link, method, header), servers.links)

    def _call(self, link: Link, method: str, header: Any) -> Any:
        return link.call(method, Frame(copy.deepcopy(header), {}), patience_seconds=1.0).header


def end_pause(control: PSControl, patience_seconds: float = 1.0) -> list[int]:
    """Ends the pause on all servers that hold the model by the present map; returns the indices of those that do not
    answer, or hold it by another map, because a master was killed while their number changed."""
    servers, others = control.servers, []
    request = pb.MoveRequest(step=pb.OPEN, map_version=servers.shard_map.version)
    for index, link in enumerate(servers.links):
        try:
            answer = link.call("Move", Frame(copy.deepcopy(request), {}), patience_seconds=patience_seconds).header
            if answer.map_version != servers.shard_map.version:
                others.append(index)
        except ElasticCBError as error:  # it is lost, slow, or has no model yet
            logger.warning("%s", error)
            others.append(index)
    return others


def _names(taken: Mapping[int, int]) -> list[pb.PushName]:
    return [pb.PushName(worker_id=worker, sequence=last) for worker, last in taken.items()]


logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_MOST_SERVERS = 256


class ServerScaling:
    """Takes requests, one at a time, and carries them out."""

    def __init__(self, master: MasterServer) -> None:
        self._master = master

    def ask(self, servers: int, waiting: bool, seconds: float) -> Wish | None:
        """Requests a different number of parameter servers, and waits up to `seconds` for the result.

        Returns None when the number is already right. Raises `UsageError` when the job can't have it.
        """
        with self._master.change() as state:
            wish = state.wish
            asked = wish is not None and not wish.done and wish.servers == servers
            if not waiting and not asked:
                before = _check(state, servers)
                if servers == before:
                    return None
                wish = state.wish = Wish(servers, before)
                if servers > before:
                    self._master.resize(Role.PS, servers)
            if wish is None:
                raise UsageError("Another master took over the job. Try again.")
            asked_for = wish
            state = self._master.wait_for(lambda state: asked_for.done or state.closing, seconds)
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
        with self._master.state() as state:
            wish = state.wish
            if wish is None or wish.done:
                return
            refused = why_not(wish.servers)
            if refused:
                with self._master.change():
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
                with self._master.change() as state:
                    self._end(state, wish, error=f"The number of parameter servers could not change: {error}")
            return
        with self._master.change() as state:
            self._end(state, wish, moved=str(moved))

    def _end(self, state: JobMachine, wish: Wish, moved: str = "", error: str = "") -> None:
        """Ends a request with its result."""
        wish.moved, wish.error = moved, error
        state.print(moved or error)
        if error:
            self._master.resize(Role.PS, wish.before)


def _check(state: JobMachine, servers: int) -> int:
    """The current number. Raises `UsageError` when `servers` is not possible."""
    if not 1 <= servers <= _MOST_SERVERS:
        raise UsageError(f"{servers} parameter servers is invalid: must be from 1 to {_MOST_SERVERS}.")
    state.check_under_way()
    assert state.settings is not None
    if state.settings.command is not Command.TRAIN:
        raise UsageError("Only training jobs can change the number of parameter servers.")
    if state.wish is not None and not state.wish.done:
        raise UsageError(
            f"The job is still changing to {how_many(state.wish.servers, 'parameter server')}. Try again later."
        )
    return state.roster.size(Role.PS)
