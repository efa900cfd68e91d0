"""All parameter servers of a job as a group: who they are now, and calls to one, some or all of them."""

from __future__ import annotations

import copy
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elasticcb.errors import ConnectionLostError, ElasticCBError
from elasticcb.process.signals import each, in_other_thread
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.security.credentials import OPEN, Access
from elasticcb.sharding.array_names import STATE, WEIGHTS, only
from elasticcb.sharding.flat_blocks import PlacedBlocks, kept
from elasticcb.sharding.partition import Places, ServerPlace, Slice, VariableSpec, partition

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_MOST_CALLS = 1_000  # at once; threads start as needed
_MOVING_PAUSE_SECONDS = 0.01  # before retrying a server that is handing over its data
_PAUSE_SECONDS = 0.1  # before retrying a server that does not answer and is not replaced
# A server's first update may take minutes to compile, and other calls wait for it. A dead machine is detected by gRPC's
# keepalive.
_DEADLINE_SECONDS = 600.0


class MapChangedError(ElasticCBError):
    """A server uses another shard map than the client, of at least `version`."""

    def __init__(self, version: int) -> None:
        super().__init__(f"The servers use a shard map of version {version} or later.")
        self.version = version


class ServerReplacedError(ElasticCBError):
    """A server was replaced during calls that belong together."""


@dataclass
class KnownServer:
    """One server, as known by its client."""

    index: int
    slices: Sequence[Slice]
    link: Link
    moving: threading.Lock = field(default_factory=threading.Lock)
    blocks: dict[str, Array] = field(default_factory=dict)
    version: int = -1
    state_version: int = -1
    slots_version: int = 0
    pulled: bool = False  # whether `blocks` are valid

    def note_answer(self, request: pb.ExchangeRequest, answer: Frame[Any]) -> None:
        """Stores the weights of an answer, and their versions."""
        self.slots_version = answer.header.slots_version
        if request.pull:
            self.version, self.state_version = answer.header.version, answer.header.state_version
            self.pulled = True
        blocks = only(answer.tensors, WEIGHTS, STATE)
        if blocks:
            self.blocks = {**self.blocks, **kept(blocks)}


class ServerGroup:
    """The parameter servers of a job.

    Args:
        find: called with an index and the id of a process that gave no answer; returns address and id of the current
            process, or "" and 0 when the index no longer exists. It waits while a lost server is replaced; calls then
            continue with the new one. None: servers are not replaced.
        find_map: returns the servers of a map of at least a version, if their number may change while they are in use;
            None: it does not.

    Attributes:
        known: the servers, by index; replaced by a new list when their number changes.

    Its calls raise `ConnectionLostError` when a server stays unreachable, `WireError` when it refuses a message.
    """

    def __init__(
        self,
        places: Places,
        specs: Sequence[VariableSpec],
        split: bool,
        patience_seconds: float = 30.0,
        access: Access = OPEN,
        find: Callable[[int, int], tuple[str, int]] | None = None,
        find_map: Callable[[int], Places] | None = None,
    ) -> None:
        self.specs, self.split = list(specs), split
        self._patience, self._access = patience_seconds, access
        self._find, self._find_map = find, find_map
        self._closed = False
        self._pool = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="ps-client")
        self._blocks_before: PlacedBlocks = PlacedBlocks((), ())
        self.shard_map = places.shard_map
        self.known: list[KnownServer] = []
        self.follow(places)

    @property
    def links(self) -> list[Link]:
        """Connections to the servers, by index."""
        return [server.link for server in self.known]

    @property
    def partition(self) -> Sequence[Sequence[Slice]]:
        """The part of each server, except embedding tables."""
        return [server.slices for server in self.known]

    # ------------------------------------------------------------ pulled weights

    @property
    def blocks(self) -> PlacedBlocks:
        """The newest pulled weights."""
        servers = self.known  # another thread may replace it
        if not all(server.pulled for server in servers):  # their number has changed
            return self._blocks_before
        return PlacedBlocks([server.blocks for server in servers], [server.slices for server in servers])

    @property
    def has_moved(self) -> bool:
        """Whether the number of servers has changed since the last pull."""
        return bool(self._blocks_before) and not all(server.pulled for server in self.known)

    # ------------------------------------------------------------ the servers

    def follow(self, places: Places) -> None:
        """Switches to these servers."""
        if self.known:
            self._blocks_before = self.blocks
        self.shard_map = places.shard_map
        known = {(server.index, server.link.address, server.link.id): server.link for server in self.known}
        links = []
        for index, place in enumerate(places.servers):
            links.append(known.pop((index, *place)) if (index, *place) in known else self.link(index, *place))
        parts = partition(self.specs, len(links), self.split)
        self.known = [KnownServer(index, *each) for index, each in enumerate(zip(parts, links, strict=True))]
        for link in known.values():
            link.close()

    def by_present_map(self, function: Callable[[], Answer]) -> Answer:
        """Calls `function`, again if the number of servers has changed meanwhile."""
        while True:
            try:
                return function()
            except MapChangedError as changed:
                if self._find_map is None:
                    raise
                self.follow(self._find_map(max(changed.version, self.shard_map.version + 1)))
                logger.info("The job now has %d parameter servers", len(self.known))

    def link(self, index: int, address: str, id: int, patience_seconds: float | None = None) -> Link:
        """A separate connection to a process that is, or will be, the server with an index."""
        return Link(index, address, id, self._patience if patience_seconds is None else patience_seconds, self._access)

    # ------------------------------------------------------------ calls

    def each(self, function: Callable[..., Answer], *arguments: Iterable[Any]) -> list[Answer]:
        """Like `map`, with a thread per call."""
        return each(self._pool, function, *arguments)

    def on_all(self, method: str, header: Any) -> list[Any]:
        """The headers of all servers' answers, by index."""
        return self.each(lambda server: self.call(server, method, header).header, self.known)

    def call(self, server: KnownServer, method: str, header: Any) -> Frame[Any]:
        """A server's answer to a frame without arrays; `header` is not modified."""
        return self.send(server, Frame(copy.deepcopy(header), {}), method)

    def send(self, server: KnownServer, frame: Frame[Any], method: str = "Exchange") -> Frame[Any]:
        """The answer of a server, or of its replacement."""
        begun = time.monotonic()
        while True:
            link = server.link
            try:
                answer = link.call(method, frame, None if self._find is None else 0.0)
                if method == "Exchange" and answer.header.status == pb.WAITS:
                    begun = time.monotonic()  # other workers may take their time
                    continue
                if method == "Exchange" and answer.header.status == pb.MOVING:
                    time.sleep(_MOVING_PAUSE_SECONDS)
                    continue
                return answer
            except ConnectionLostError:
                if self._closed or self._find is None:
                    raise
                if self._moved(server, link):
                    begun = time.monotonic()
                    if method == "Exchange":
                        frame.header.known_version = frame.header.known_state_version = -1
                elif time.monotonic() - begun > self._patience:
                    raise
                else:
                    time.sleep(_PAUSE_SECONDS)

    def _moved(self, server: KnownServer, failed: Link) -> bool:
        """Whether the server process that `failed` was replaced by another."""
        with server.moving:
            if server.link is not failed:
                return True
            assert self._find is not None
            address, id = self._find(server.index, failed.id)
            if not id:
                raise MapChangedError(0)
            if id == failed.id:
                return False
            self.connect(server, ServerPlace(address, id))
            return True

    def connect(self, server: KnownServer, place: ServerPlace) -> None:
        """Calls to a server go to this process from now on; calls to the previous one end."""
        before = server.link
        if before.id == place.id:
            return
        logger.info("Parameter server %d is now at %s", server.index, place.address)
        server.link = self.link(server.index, *place)
        # The new process counts versions by itself.
        server.version = server.state_version = -1
        before.close()

    def end_calls(self, index: int) -> None:
        """Aborts calls to a lost server; `find` then returns its replacement."""
        known = self.known  # another thread may replace it
        if index < len(known):
            threading.Thread(target=known[index].link.close, name="end-calls", daemon=True).start()

    def free_memory(self) -> None:
        """Frees memory shared with the servers, after large frames."""
        for link in self.links:
            link.free_memory()

    def close(self) -> None:
        """Closes all connections."""
        self._closed = True
        self._pool.shutdown(wait=False)
        for link in self.links:
            link.close()


class Link:
    """The connection to one process that is a server."""

    def __init__(self, index: int, address: str, id: int, patience_seconds: float, access: Access) -> None:
        self.address, self.id = address, id
        self._connection = Connection(address, f"parameter server {index}", patience_seconds, access)

    def call(
        self,
        method: str,
        frame: Frame[Any],
        patience_seconds: float | None = None,
        deadline_seconds: float = _DEADLINE_SECONDS,
    ) -> Frame[Any]:
        """The server's answer. A frame that is sent again after an error is the same call, which is executed once."""
        called = PS_METHODS[method]
        if called.is_numbered and not frame.header.call:
            frame.header.call = secrets.randbits(62) + 1
        return in_other_thread(self._connection.call, called, frame, deadline_seconds, patience_seconds)

    def free_memory(self) -> None:
        self._connection.free_memory()

    def close(self) -> None:
        self._connection.close()
