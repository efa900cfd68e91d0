"""Pushes to and pulls from all parameter servers of a job; used by workers and by the master."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elasticcb.clients.ps_link import Link, Places
from elasticcb.errors import ConnectionLostError, ElasticCBError
from elasticcb.process.stats import LOOKUP, PULL, PUSH, Measures
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.shared_memory import aligned_copy
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.security.credentials import OPEN, Access
from elasticcb.sharding.array_names import STATE, TABLE, WANTED, by_index, named, of_kind, without
from elasticcb.sharding.bucket_map import BucketMap, even
from elasticcb.sharding.flat_blocks import Blocks, PlacedBlocks, kept, moved_state, unpack_weights
from elasticcb.sharding.partition import Slice, VariableSpec, partition
from elasticcb.sharding.push import Gradients
from elasticcb.sharding.table_state import TableState, joined
from elasticcb.sharding.table_state import from_tensors as tables_from

logger = logging.getLogger(__name__)

Ids = Mapping[int, Array]  # by embedding table, unique int64 [n]

_MOVING_PAUSE_SECONDS = 0.01  # before a server that hands over what it holds is asked again
_PAUSE_SECONDS = 0.1  # before a server that does not answer, and is not replaced, is asked again


@dataclass(frozen=True)
class PushResult:
    """The servers' answer to a push.

    Attributes:
        status: a `pb.PushStatus`.
        version: of the model after it.
        rows: of embedding tables, by variable: the rows [n, dim] of the ids that were asked for.
    """

    status: int
    reason: str
    version: int
    rows: dict[int, Array] = field(default_factory=dict)


class _MapChangedError(ElasticCBError):
    """A server holds its part by another map than the client's: of at least `version`."""

    def __init__(self, version: int) -> None:
        super().__init__(f"The servers hold the model by a map of version {version} or later.")
        self.version = version


class ServerReplacedError(ElasticCBError):
    """A server was replaced in the midst of calls that belong together."""


@dataclass
class KnownServer:
    """One server as its client knows it."""

    index: int
    slices: Sequence[Slice]
    link: Link
    moving: threading.Lock = field(default_factory=threading.Lock)
    blocks: dict[str, Array] = field(default_factory=dict)
    version: int = -1
    state_version: int = -1
    state_base: int = -1  # the last version that the state in `blocks` builds on
    rows: dict[int, Array] = field(default_factory=dict)  # of embedding tables, that the last exchange brought
    pulled: bool = False  # whether `blocks` are there


class PSClient:
    """All parameter servers of a job as one.

    Args:
        addresses: of the servers, by index.
        specs: the model's weights.
        split: whether variables may be cut between servers.
        client_id: the worker's id; names the origin of pushes.
        synchronous: pushes to several servers then are staged, and decided by the first server.
        access: to the job.
        ids: of the servers' processes, by index.
        buckets: which server holds which rows of embedding tables; None: the even map.
        find: by index, and the id of the process that gave no answer, the address and the id of the process that is
            the server now, "" and 0 when there is none in this place any more. It waits while a lost server is
            replaced; calls then go on with the new one. None: servers are not replaced.
        find_map: gives the servers by a map of at least a version, when their number changes while the client is in
            use; None: it does not.
        measures: how long calls take, and how many rows are looked up.

    Its methods raise `ConnectionLostError` when a server stays out of reach, `WireError` when it
    refuses a message.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        specs: Sequence[VariableSpec],
        split: bool,
        client_id: int = 0,
        synchronous: bool = False,
        patience_seconds: float = 30.0,
        access: Access = OPEN,
        ids: Sequence[int] = (),
        find: Callable[[int, int], tuple[str, int]] | None = None,
        buckets: BucketMap | None = None,
        find_map: Callable[[int], Places] | None = None,
        measures: Measures | None = None,
    ) -> None:
        self._measures = measures or Measures()
        self.specs = list(specs)
        self.split = split
        self.version = 0  # of the model, as the first server counts it
        self.learning_rate = 0.0  # the base rate
        self.learning_rate_version = -1  # rises when the master sets the base rate
        self.snapshot_version = 0  # of the weights that `pull_snapshot` fetched last
        self._client_id = client_id
        self._exchanging = threading.RLock()  # a worker may push in one thread and pull in another
        self._staged = synchronous and len(addresses) > 1
        self._sequence = 0
        self._patience, self.access = patience_seconds, access
        self._find, self._find_map = find, find_map
        self._closed = False
        self._servers: list[KnownServer] = []
        self._blocks_before = PlacedBlocks((), ())
        self.follow(Places(addresses, ids or [0] * len(addresses), buckets or even(len(addresses))))

    @property
    def links(self) -> list[Link]:
        """To the servers, by index."""
        return [server.link for server in self._servers]

    def follow(self, places: Places) -> None:
        """Speaks to these servers from now on."""
        count = len(places.addresses)
        self.buckets, self.partition = places.buckets, partition(self.specs, count, self.split)
        if self._servers:
            self._blocks_before = self.blocks
        known = {(server.index, server.link.address, server.link.id): server.link for server in self._servers}
        links = []
        for index, place in enumerate(zip(places.addresses, places.ids, strict=True)):
            link = known.pop((index, *place)) if (index, *place) in known else self._link(index, place)
            links.append(link)
        self._servers = [KnownServer(*each) for each in zip(range(count), self.partition, links, strict=True)]
        # Another thread may look at the blocks meanwhile.
        self._present = self._servers, self.partition
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="ps-client")
        for link in known.values():
            link.close()

    @property
    def _has_moved(self) -> bool:
        """Whether the number of servers has changed since the last pull."""
        return bool(self._blocks_before) and not all(server.pulled for server in self._servers)

    def _measured(self, call: str, function: Callable[[], Any]) -> Any:
        """`_by_present_map`, and how long it takes."""
        begun = time.perf_counter()
        answer = self._by_present_map(function)
        self._measures.histograms[call].observe(time.perf_counter() - begun)
        return answer

    def _by_present_map(self, function: Callable[[], Any]) -> Any:
        """Does what `function` does, again when the number of servers has changed meanwhile."""
        while True:
            try:
                return function()
            except _MapChangedError as changed:
                if self._find_map is None:
                    raise
                self.follow(self._find_map(max(changed.version, self.buckets.version + 1)))
                logger.info("There are %d parameter servers now", len(self._servers))

    def _link(self, index: int, place: tuple[str, int]) -> Link:
        return Link(index, *place, self._patience, self.access)

    @property
    def blocks(self) -> PlacedBlocks:
        """The newest weights pulled."""
        servers, parts = self._present
        if not all(server.pulled for server in servers):  # their number has changed
            return self._blocks_before
        return PlacedBlocks((server.blocks for server in servers), parts)

    @property
    def weights_version(self) -> int:
        """Of the newest weights pulled, as the first server counts it; -1: none of the present one."""
        return self._servers[0].version

    def pull(self) -> PlacedBlocks:
        """Fetches what is newer than the weights at hand."""
        with self._exchanging:
            self._measured(
                PULL,
                lambda: self._exchange(
                    self._servers, [self._request(server, None, pull=True) for server in self._servers]
                ),
            )
            return self.blocks

    def lookup(self, ids: Ids, create: bool = False, evaluation_round: int = 0, pull: bool = False) -> dict[int, Array]:
        """Rows of embedding tables, by variable: [n, dim] each.

        Args:
            ids: by variable, unique ids (int64 [n]).
            create: ids that have no row get one, as in training.
            evaluation_round: of whose snapshot the rows are; 0: as they are now.
            pull: fetch newer weights, too.
        """
        with self._exchanging:
            found: dict[int, Array] = self._measured(LOOKUP, lambda: self._lookup(ids, create, evaluation_round, pull))
            return found

    def _lookup(self, ids: Ids, create: bool, evaluation_round: int, pull: bool) -> dict[int, Array]:
        frames = []
        asked = self._split(ids)
        for server, wanted in zip(self._servers, asked, strict=True):
            header = self._request(server, None, pull).header
            header.create_rows, header.snapshot = create, evaluation_round
            if evaluation_round:
                header.pull = False
            frames.append(Frame(header, _lookups(wanted)))
        if evaluation_round:  # whose version is not the present one
            for server, answer in zip(self._servers, self._exchanged(self._servers, frames), strict=True):
                server.rows = by_index(TABLE, answer.tensors)
        else:
            self._exchange(self._servers, frames)
        return self._rows_found(ids, asked)

    def read_table(self, variable: int, chunk_rows: int = 65_536) -> Iterator[tuple[Array, Array]]:
        """All (ids [n], rows [n, dim]) of an embedding table, in pieces; nobody must be training it meanwhile.

        Raises `ServerReplacedError` when a server is replaced meanwhile: its rows have other places then.
        """
        for piece in self._table_pieces(variable, chunk_rows):
            yield piece.ids, piece.rows

    def _table_pieces(self, variable: int, chunk_rows: int = 65_536, export_id: int = 0) -> Iterator[TableState]:
        """The same; with `export_id`, all that the servers hold for that export, which may be trained meanwhile."""
        for server in self._servers:
            link, start, total = server.link, 0, 1
            while start < total:
                request = pb.ReadTableRequest(variable=variable, start=start, count=chunk_rows, export_id=export_id)
                try:
                    answer = self._call(server, "ReadTable", request)
                except ElasticCBError:
                    if server.link is link:
                        raise
                if server.link is not link:
                    raise ServerReplacedError(
                        f"Parameter server {server.index} was replaced while the embedding table "
                        f"{self.specs[variable].path!r} was read. Read it again."
                    )
                piece = tables_from(answer.tensors)[variable]
                yield piece
                start, total = start + len(piece.ids), answer.header.total

    def weights(self, blocks: Blocks | None = None) -> tuple[list[Array], dict[int, Array]]:
        """All weights, in the order of the specs, and the ids of embedding tables, both as in `ModelState`.

        Args:
            blocks: of all but tables; None pulls them.
        """
        weights = unpack_weights(self.pull() if blocks is None else blocks, self.specs, self.partition)
        ids: dict[int, Array] = {}
        for index, spec in enumerate(self.specs):
            if spec.table:
                whole = self._whole_table(index)
                ids[index], weights[index] = whole.ids, whole.rows
        return weights, ids

    def _whole_table(self, variable: int) -> TableState:
        while True:
            with contextlib.suppress(ServerReplacedError):
                return joined(list(self._table_pieces(variable)))

    def pull_snapshot(self, evaluation_round: int) -> PlacedBlocks:
        """The weights that the servers keep for an evaluation round; `snapshot_version` is theirs."""

        def pull() -> PlacedBlocks:
            request = pb.ExchangeRequest(
                pull=True,
                known_version=-1,
                known_state_version=-1,
                snapshot=evaluation_round,
                map_version=self.buckets.version,
            )
            answers = self._exchanged(self._servers, [Frame(request, {}) for _ in self._servers])
            self.snapshot_version = answers[0].header.version
            # They are kept while others come.
            kept = [{name: aligned_copy(block) for name, block in answer.tensors.items()} for answer in answers]
            return PlacedBlocks(kept, self.partition)

        with self._exchanging:
            blocks: PlacedBlocks = self._by_present_map(pull)
            return blocks

    def push(
        self, push: Gradients, learning_rate: float | None, pull: bool = True, ids: Ids | None = None
    ) -> PushResult:
        """Hands over the gradients of one step on `blocks`, and by default fetches the weights after it.

        Args:
            learning_rate: for this push only; None takes the servers' base rate.
            ids: of embedding tables, by variable: whose rows after the update to fetch along (`create`d, as in
                training); unique int64 [n].
        """
        with self._exchanging:
            self._sequence += 1
            # Servers that have taken the push under its name, by the last map, don't apply it again.
            result: PushResult = self._measured(
                PUSH, lambda: self._push(push.recut(self.specs, self.partition), learning_rate, pull, ids or {})
            )
            return result

    def _push(self, push: Gradients, learning_rate: float | None, pull: bool, ids: Ids) -> PushResult:
        asked = self._split(ids)
        # Staged pushes change the other servers only once the first one has decided.
        pull_along = pull and not self._staged
        # While an update goes from server to server, a pull may find them at different versions.
        oldest = min(server.version for server in self._servers) if self._staged else None
        frames = []
        for index, server in enumerate(self._servers):
            header = self._request(server, push, pull_along).header
            header.version = server.version if oldest is None else oldest
            header.staged = self._staged and index > 0
            part = push.part(index, self.specs, server.slices, self.buckets, server.state_base, learning_rate)
            tensors = part.encode(header)
            if not self._staged:
                header.create_rows = True
                tensors |= _lookups(asked[index])
            frames.append(Frame(header, tensors))
        first = 1 if self._staged else 0
        headers = self._exchange(self._servers[first:], frames[first:])
        refused = next((header for header in headers if header.status == pb.NON_FINITE), None)
        if self._staged and refused is None:
            headers = self._exchange(self._servers[:1], frames[:1])
        decided = refused or headers[0]
        if decided.status == pb.ACCEPTED and not pull and not frames[0].header.pull:
            # Until the next pull the worker goes on with the state that it has come to.
            answers = [decided] * len(self._servers) if self._staged else headers
            for server, answer, state, shares in zip(self._servers, answers, push.state, push.shares, strict=False):
                server.state_base = answer.version
                server.blocks = {**server.blocks, **_after(server.blocks, state, shares)}
        result = PushResult(decided.status, decided.reason, self.version)
        if not self._staged:
            result.rows.update(self._rows_found(ids, asked))
        elif pull and ids:
            result.rows.update(self.lookup(ids, create=True, pull=True))
        elif pull:
            self.pull()
        return result

    def _request(self, server: KnownServer, push: Gradients | None, pull: bool) -> Frame[Any]:
        header = pb.ExchangeRequest(
            worker_id=self._client_id,
            pull=pull or self._has_moved,
            known_version=server.version,
            known_state_version=server.state_version,
            map_version=self.buckets.version,
        )
        if push is not None:
            header.sequence = self._sequence
            header.loss = push.loss
            header.non_finite = push.non_finite
        return Frame(header, {})

    def _split(self, ids: Ids) -> list[dict[int, tuple[Array, Any]]]:
        """By server and table, the ids that the server holds, and where they are among all."""
        count = len(self._servers)
        if count == 1:
            return [{table: (own, slice(None)) for table, own in ids.items()}]
        parts: list[dict[int, tuple[Array, Any]]] = [{} for _ in self._servers]
        for table, own in ids.items():
            owners = self.buckets.server_of(own)
            for index, part in enumerate(parts):
                places = np.flatnonzero(owners == index)
                part[table] = own[places], places
        return parts

    def _rows_found(self, ids: Ids, asked: Sequence[Mapping[int, tuple[Array, Any]]]) -> dict[int, Array]:
        """The rows that the last exchange has brought, in the order of `ids`."""
        self._measures.rows_looked_up += sum(map(len, ids.values()))
        if len(self._servers) == 1:
            return {table: self._servers[0].rows[table] for table in ids}
        found: dict[int, Array] = {}
        for table, own in ids.items():
            first = self._servers[0].rows[table]
            rows = found[table] = np.empty((len(own), *first.shape[1:]), first.dtype)
            for server, part in zip(self._servers, asked, strict=True):
                rows[part[table][1]] = server.rows[table]
        return found

    def _exchange(self, servers: Sequence[KnownServer], frames: Sequence[Frame[Any]]) -> list[Any]:
        answers = self._exchanged(servers, frames)
        for server, frame, answer in zip(servers, frames, answers, strict=True):
            header = answer.header
            if server is self._servers[0]:
                self.version, self.learning_rate = header.version, header.learning_rate
                self.learning_rate_version = header.base_learning_rate_version
            if frame.header.pull:
                server.version, server.state_version = header.version, header.state_version
                server.state_base = header.version
                server.pulled = True
            server.rows = by_index(TABLE, answer.tensors)
            if len(answer.tensors) > len(server.rows):
                server.blocks = {**server.blocks, **kept(without(answer.tensors, TABLE))}
        return [answer.header for answer in answers]

    def _exchanged(self, servers: Sequence[KnownServer], frames: Sequence[Frame[Any]]) -> list[Frame[Any]]:
        """The answers to calls of `Exchange`."""
        if len(servers) == 1:
            answers = [self._call_frame(servers[0], frames[0])]
        else:
            answers = list(self._pool.map(self._call_frame, servers, frames))
        moved = [answer.header.map_version for answer in answers if answer.header.status == pb.MOVED]
        if moved:
            raise _MapChangedError(max(moved))
        return answers

    def _call(self, server: KnownServer, method: str, header: Any) -> Frame[Any]:
        return self._call_frame(server, Frame(header, {}), method)

    def _call_frame(self, server: KnownServer, frame: Frame[Any], method: str = "Exchange") -> Frame[Any]:
        begun = time.monotonic()
        while True:
            link = server.link
            try:
                answer = link.call(method, frame, None if self._find is None else 0.0)
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
        """Whether another process is the server now, which has taken the place of the one that `failed`."""
        with server.moving:
            if server.link is not failed:
                return True
            assert self._find is not None
            address, id = self._find(server.index, failed.id)
            if not id:
                raise _MapChangedError(0)
            return self._follow(server, address, id)

    def _follow(self, server: KnownServer, address: str, id: int) -> bool:
        """Speaks to another process from now on, if it is another one; returns whether it is."""
        if id == server.link.id:
            return False
        logger.info("Parameter server %d is at %s now", server.index, address)
        before, server.link = server.link, self._link(server.index, (address, id))
        # The new one counts for itself.
        server.version = server.state_version = server.state_base = -1
        before.close()
        return True

    def close(self) -> None:
        """Ends all connections."""
        self._closed = True
        self._pool.shutdown(wait=False)
        for server in self._servers:
            server.link.close()


def _after(blocks: Mapping[str, Array], state: Mapping[str, Array], shares: Mapping[str, Array]) -> dict[str, Array]:
    """The state in `blocks` after the step of a push."""
    before = of_kind(STATE, blocks)
    return named(STATE, {dtype: moved_state(before[dtype], state[dtype], shares[dtype], 0) for dtype in shares})


def _lookups(wanted: Mapping[int, tuple[Array, Any]]) -> dict[str, Array]:
    return named(WANTED, {table: own for table, (own, _) in wanted.items()})
