"""Changes the number of parameter servers: the master's side of the protocol, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elasticcb.clients.ps_link import Link
from elasticcb.errors import ConnectionLostError, ElasticCBError, HandlerError
from elasticcb.master.ps_admin import PSControl
from elasticcb.process.interruptible import each
from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.bucket_map import BUCKETS

logger = logging.getLogger(__name__)

_COPIES = 3  # passes; later ones copy only rows trained meanwhile, to shorten the pause
_DRAIN_SECONDS = 10.0  # for a worker to finish a push that some servers have applied
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Moved:
    """Result of a move.

    Attributes:
        bytes: size of the rows, slots and dense variables that were sent.
        seconds, paused: total duration, and the part without updates.
    """

    servers: int
    before: int
    buckets: int
    rows: int
    bytes: int
    seconds: float
    paused: float

    def __str__(self) -> str:
        return (
            f"The job now has {how_many(self.servers, 'parameter server')} (was {self.before}). Moved {self.buckets:,} "
            f"of {BUCKETS:,} buckets ({_size(self.bytes)}) in {self.seconds:.1f} s; updates paused for "
            f"{self.paused:.1f} s."
        )


class ServerMove:
    """Moves the model to a different number of servers.

    Args:
        links: to all servers, old and new, by index.
        servers: new number; the first of `links`.
        is_up: whether a worker, by id, may still finish a push.
    """

    def __init__(self, control: PSControl, links: Sequence[Link], servers: int, is_up: Callable[[int], bool]) -> None:
        self._control, self._links, self._servers, self._is_up = control, links, servers, is_up
        self._before = len(control.servers.partition)
        self.buckets = control.servers.buckets.resized(servers)
        self._pool = ThreadPoolExecutor(len(links), thread_name_prefix="move")

    def run(self, commit: Callable[[], None]) -> Moved:
        """Runs the move; `commit` persists the new map.

        Raises `ElasticCBError` when a server is lost before that, or a worker does not finish its push: the servers
        continue with the old map.
        """
        begun = time.monotonic()
        try:
            self._prepare()
            copied = [answer for _ in range(_COPIES) for answer in self._step(pb.COPY)]
            closed = time.monotonic()
            taken = self._close()
            handed = self._step(pb.HAND_OVER, pushes=_names(taken))
            version = max(answer.version for answer in handed)
            self._step(pb.SETTLE, version=version)
            commit()
        except BaseException:
            self._tell_all(pb.ABANDON)
            raise
        self._tell_all(pb.OPEN)  # the new map now applies: an unreachable server is replaced by one that knows it
        ended = time.monotonic()
        return Moved(
            servers=self._servers,
            before=self._before,
            buckets=self._control.servers.buckets.moved(self.buckets),
            rows=sum(answer.rows for answer in copied),
            bytes=sum(answer.bytes for answer in [*copied, *handed]),
            seconds=ended - begun,
            paused=ended - closed,
        )

    def _prepare(self) -> None:
        model = self._control.model_by(self.buckets, [link.address for link in self._links[: self._servers]])

        def prepare(index: int) -> None:
            request = pb.MoveRequest(step=pb.PREPARE, map_version=self.buckets.version, servers_before=self._before)
            request.model.CopyFrom(model)
            request.model.index = index
            self._links[index].call("Move", Frame(request, {}), patience_seconds=1.0)

        each(self._pool, prepare, range(len(self._links)))

    def _close(self) -> dict[int, int]:
        """Stops accepting pushes, except those that one server has applied; returns each worker's last push."""
        taken: dict[int, int] = {}
        for answer in self._step(pb.CLOSE):
            for push in answer.pushes:
                taken[push.worker_id] = max(push.sequence, taken.get(push.worker_id, 0))
        give_up = time.monotonic() + _DRAIN_SECONDS
        while True:
            missing = {p.worker_id for answer in self._step(pb.DRAIN, pushes=_names(taken)) for p in answer.pushes}
            missing = {worker for worker in missing if self._is_up(worker)}
            if not missing:
                return taken
            if time.monotonic() > give_up:
                raise ElasticCBError(
                    f"Worker {min(missing)} did not finish a push that some servers had already applied within "
                    f"{_DRAIN_SECONDS:.0f} s."
                )
            time.sleep(_PAUSE_SECONDS)

    def _step(self, step: int, **fields: Any) -> list[Any]:
        """Sends a step to all servers; returns their answers, by index."""

        def take(link: Link) -> Any:
            request = pb.MoveRequest(step=step, map_version=self.buckets.version, **fields)  # type: ignore[arg-type]
            return link.call("Move", Frame(request, {}), patience_seconds=1.0).header

        return each(self._pool, take, self._links)

    def _tell_all(self, step: int) -> None:
        def tell(link: Link) -> None:
            request = pb.MoveRequest(step=step, map_version=self.buckets.version)  # type: ignore[arg-type]
            try:
                link.call("Move", Frame(request, {}), patience_seconds=1.0)
            except (ConnectionLostError, HandlerError) as error:
                logger.warning("%s", error)

        each(self._pool, tell, self._links)

    def write_down(self) -> None:
        """Makes each server write recovery files now; after this, those of the old map are not needed.

        Raises `ConnectionLostError` when a server is lost meanwhile.
        """
        kept = self._links[: self._servers]
        for step in (pb.WRITE, pb.FORGET):
            request = pb.MoveRequest(step=step, map_version=self.buckets.version)
            # Short timeout: a lost server must be replaced.
            each(self._pool, lambda link: link.call("Move", Frame(request, {}), 1.0), kept)  # noqa: B023

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def end_earlier_move(control: PSControl) -> None:
    """Ends an unfinished move of a killed master, by the map in the journal, which `control` uses."""
    version = control.servers.buckets.version
    for step, of in ((pb.OPEN, version), (pb.ABANDON, version + 1)):
        for link in control.servers.links:
            try:
                link.call("Move", Frame(pb.MoveRequest(step=step, map_version=of), {}), patience_seconds=1.0)
            except ElasticCBError as error:  # lost and will be replaced, or has no model yet
                logger.warning("%s", error)


def _names(taken: Mapping[int, int]) -> list[pb.PushName]:
    return [pb.PushName(worker_id=worker, sequence=last) for worker, last in taken.items()]


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
