"""Changes the number of parameter servers in a short pause, in which servers read each other's files."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticcb.clients.ps_servers import Link
from elasticcb.errors import ElasticCBError
from elasticcb.master.ps_admin import PSControl
from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame

logger = logging.getLogger(__name__)

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
