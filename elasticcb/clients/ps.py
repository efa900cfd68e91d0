"""Pushes to and pulls from all parameter servers of a job; used by workers and by the master."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elasticcb.clients.ps_servers import KnownServer, MapChangedError, ServerGroup, ServerReplacedError
from elasticcb.errors import ElasticCBError
from elasticcb.optimizers.state import OptimizerState, from_tensors, join_states
from elasticcb.process.stats import LOOKUP, PULL, PUSH, Measures
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.shared_frames import aligned_copy
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.settings import WireDtype
from elasticcb.sharding.array_names import (
    EXTRAS,
    MOVED,
    SHARED,
    SLOTS,
    STATE,
    TABLE,
    WANTED,
    WEIGHTS,
    by_index,
    named,
    of_kind,
    only,
)
from elasticcb.sharding.flat_blocks import Blocks, PlacedBlocks, moved_state, unpack_weights
from elasticcb.sharding.push import Movement, narrowed, widened
from elasticcb.sharding.table_state import TableState, joined
from elasticcb.sharding.table_state import from_tensors as tables_from

_ROWS = 65_536  # of an embedding table, per piece
Ids = Mapping[int, Array]  # by embedding table, unique int64 [n]


@dataclass
class PushResult:
    """The servers' answer to a push.

    Attributes:
        rows: requested rows of embedding tables, by variable: [n, dim] each.
        optimizers: after a movement, the steps and rates of the servers' optimizers; None: nobody else has changed the
            model since the worker's last exchange, so it already has them.
    """

    version: int
    rows: dict[int, Array] = field(default_factory=dict)
    optimizers: OptimizerState | None = None


class PSClient:
    """The model held by all parameter servers of a job.

    Args:
        client_id: id of the worker, part of the name of each push.
        measures: statistics of call durations and looked-up rows.
        wire_dtype: of movements on the wire; the servers send embedding rows for training likewise.

    Attributes:
        version: version of the model on the first server.
        learning_rate_version: increases when the master sets the base rate.
        snapshot_version: version of the weights last fetched by `pull_snapshot`.

    Its methods raise the errors of `ServerGroup`.
    """

    def __init__(
        self,
        servers: ServerGroup,
        client_id: int = 0,
        measures: Measures | None = None,
        wire_dtype: WireDtype = WireDtype.SAME,
    ) -> None:
        self.servers = servers
        self._wire_dtype = wire_dtype
        self._measures = measures or Measures()
        self.version = 0
        self.learning_rate = 0.0
        self.learning_rate_version = -1
        self.snapshot_version = 0
        self._client_id = client_id
        self._exchanging = threading.RLock()  # a worker may push in one thread and pull in another
        self._sequence = 0

    @property
    def blocks(self) -> PlacedBlocks:
        """The newest pulled weights."""
        return self.servers.blocks

    @property
    def versions(self) -> list[int]:
        """Versions of the newest pulled weights, by server."""
        return [server.version for server in self.servers.known]

    @property
    def slots_versions(self) -> list[int]:
        """By server, a number that increases when the master sets the optimizers' state."""
        return [server.slots_version for server in self.servers.known]

    def _measured(self, call: str, function: Callable[[], Any]) -> Any:
        """Like `by_present_map`, and measures the duration."""
        begun = time.perf_counter()
        answer = self.servers.by_present_map(function)
        self._measures.histograms[call].observe(time.perf_counter() - begun)
        return answer

    def pull(self, joins: bool = False, epoch: int = 0, peers: Sequence[int] = ()) -> PlacedBlocks:
        """Fetches weights that are newer than the current ones.

        Args:
            joins: rounds wait for this worker from now on, until it `rests`.
            epoch: as of which it joins.
            peers: ids of other workers that rounds wait for, unless they rest as of this epoch.
        """
        with self._exchanging:
            self._measured(PULL, lambda: self._pull(joins=joins, epoch=epoch, peers=peers))
            return self.blocks

    def pull_with_optimizers(self) -> OptimizerState:
        """Like `pull`; returns the optimizer state except that of embedding tables."""
        with self._exchanging:
            return self._optimizers_in(self._measured(PULL, lambda: self._pull(optimizers=True)))

    def rest(self, epoch: int = 0) -> None:
        """Rounds do not wait for this worker, until it joins or pushes; as of this `epoch`, its peers can't join it."""
        with self._exchanging:
            self.servers.by_present_map(lambda: self._exchanged(_bare(self._requests(rests=True, epoch=epoch))))

    def _pull(self, **more: Any) -> list[Frame[Any]]:
        return self._exchange(_bare(self._requests(pull=True, **more)))

    def _optimizers_in(self, answers: Sequence[Frame[Any]]) -> OptimizerState:
        states = [from_tensors(only(answer.tensors, SLOTS, EXTRAS, SHARED)) for answer in answers]
        return join_states(states, self.servers.specs, self.servers.partition)

    def lookup(self, ids: Ids, create: bool = False, evaluation_round: int = 0) -> dict[int, Array]:
        """Rows of embedding tables, by variable: [n, dim] each.

        Args:
            ids: by variable, unique ids (int64 [n]).
            create: create missing rows, as in training.
            evaluation_round: read from the snapshot of this round; 0: current rows.
        """
        with self._exchanging:
            found: dict[int, Array] = self._measured(LOOKUP, lambda: self._lookup(ids, create, evaluation_round))
            return found

    def _lookup(self, ids: Ids, create: bool, evaluation_round: int) -> dict[int, Array]:
        wanted, headers = _WantedRows(ids, self.servers), self._requests(create_rows=create, snapshot=evaluation_round)
        frames = [Frame(header, wanted.of_server(index)) for index, header in enumerate(headers)]
        if evaluation_round:  # its version is not the current one
            for header in headers:
                header.pull = False
            return self._found(wanted, self._exchanged(frames))
        return self._found(wanted, self._exchange(frames))

    def _found(self, wanted: _WantedRows, answers: Sequence[Frame[Any]]) -> dict[int, Array]:
        rows = wanted.found(answers)
        self._measures.rows_looked_up += sum(map(len, rows.values()))
        return rows

    def read_table(self, variable: int, rows: int = 65_536) -> Iterator[tuple[Array, Array]]:
        """All (ids [n], rows [n, dim]) of an embedding table, in pieces of `rows` rows, as in `table_pieces`."""
        for piece in table_pieces(self.servers, variable, rows):
            yield piece.ids, piece.rows

    def weights(self, blocks: Blocks | None = None) -> tuple[list[Array], dict[int, Array]]:
        """All weights, in the order of the specs, and the ids of embedding tables, both as in `ModelState`."""
        weights = unpack_weights(self.pull() if blocks is None else blocks, self.servers.specs, self.servers.partition)
        ids: dict[int, Array] = {}
        for index, spec in enumerate(self.servers.specs):
            if spec.table:
                whole = _whole_table(self.servers, index)
                ids[index], weights[index] = whole.ids, whole.rows
        return weights, ids

    def pull_snapshot(self, evaluation_round: int) -> PlacedBlocks:
        """The weights that the servers keep for an evaluation pass; sets `snapshot_version`."""

        def pull() -> PlacedBlocks:
            request = pb.ExchangeRequest(
                pull=True,
                known_version=-1,
                known_state_version=-1,
                snapshot=evaluation_round,
                map_version=self.servers.shard_map.version,
            )
            answers = self._exchanged(_bare([request for _ in self.servers.known]))
            self.snapshot_version = answers[0].header.version
            # They are kept while others are received.
            kept = [{name: aligned_copy(block) for name, block in answer.tensors.items()} for answer in answers]
            return PlacedBlocks(kept, self.servers.partition)

        with self._exchanging:
            return self.servers.by_present_map(pull)

    def push(self, movement: Movement, bases: Sequence[int] = (), ids: Ids | None = None) -> PushResult:
        """Sends a movement, and returns when it is merged, with the weights after that; or gradients of rows.

        Args:
            bases: by server, versions on which the movement is based.
            ids: of embedding tables, by variable: rows to fetch after the update (created as in training); unique int64
                [n].
        """
        with self._exchanging:
            self._sequence += 1
            # Servers that merged the push under its name with the previous map don't merge it again.
            result: PushResult = self._measured(
                PUSH,
                lambda: self._push(movement.recut(self.servers.specs, self.servers.partition), bases, ids or {}),
            )
            return result

    def _push(self, movement: Movement, bases: Sequence[int], ids: Ids) -> PushResult:
        servers, wanted, is_movement = self.servers, _WantedRows(ids, self.servers), movement.batches > 0
        if len(bases) != len(servers.known):  # their number has changed since
            bases = [min(bases, default=-1)] * len(servers.known)
        headers, frames = self._requests(pull=is_movement, create_rows=bool(ids), sequence=self._sequence), []
        for server, header, base in zip(servers.known, headers, bases, strict=True):
            part = movement.part(server.index, servers.specs, server.slices, servers.shard_map, base)
            tensors = narrowed(part.encode(header), self._wire_dtype)
            frames.append(Frame(header, tensors | wanted.of_server(server.index)))
        answers = self._exchange(frames)
        result = PushResult(self.version, self._found(wanted, answers))
        if is_movement and not all(answer.header.alone for answer in answers):
            known = only(movement.optimizers, SHARED)
            given = [Frame(answer.header, known) if answer.header.alone else answer for answer in answers]
            result.optimizers = self._optimizers_in(given)
        for server, frame, answer in zip(servers.known, frames, answers, strict=True):
            if answer.header.alone:
                _note_movement(server, movement, widened(frame.tensors, servers.specs))
        return result

    def _requests(self, pull: bool = False, create_rows: bool = False, **more: Any) -> list[pb.ExchangeRequest]:
        """The headers of a request, by server."""
        pull = pull or self.servers.has_moved
        return [
            pb.ExchangeRequest(
                worker_id=self._client_id,
                pull=pull,
                known_version=server.version,
                known_state_version=server.state_version,
                map_version=self.servers.shard_map.version,
                create_rows=create_rows,
                **more,
            )
            for server in self.servers.known
        ]

    def _exchange(self, frames: Sequence[Frame[Any]]) -> list[Frame[Any]]:
        answers = self._exchanged(frames)
        first = answers[0].header
        self.version, self.learning_rate = first.version, first.learning_rate
        self.learning_rate_version = first.base_learning_rate_version
        for server, frame, answer in zip(self.servers.known, frames, answers, strict=True):
            server.note_answer(frame.header, answer)
        return answers

    def _exchanged(self, frames: Sequence[Frame[Any]]) -> list[Frame[Any]]:
        """The answers to calls of `Exchange`."""
        servers = self.servers.known
        if len(servers) == 1:
            answers = [self.servers.send(servers[0], frames[0])]
        else:
            answers = self.servers.each(self.servers.send, servers, frames)
        moved = [answer.header.map_version for answer in answers if answer.header.status == pb.MOVED]
        if moved:
            raise MapChangedError(max(moved))
        if self._wire_dtype is WireDtype.SAME:
            return answers
        return [Frame(answer.header, widened(answer.tensors, self.servers.specs)) for answer in answers]


def _bare(headers: Iterable[pb.ExchangeRequest]) -> list[Frame[Any]]:
    return [Frame(header, {}) for header in headers]


def _note_movement(server: KnownServer, movement: Movement, sent: Mapping[str, Array]) -> None:
    """Adds a worker's movement to what is known of a server, except to embedding tables.

    Args:
        sent: arrays of the movement's frame as the server got them, rounded for transport.
    """
    moved, before = of_kind(MOVED, sent), of_kind(STATE, server.blocks)
    weights = {dtype: block + moved[dtype] for dtype, block in of_kind(WEIGHTS, server.blocks).items()}
    values, shares = movement.state[server.index], movement.shares[server.index]
    state = {dtype: moved_state(before[dtype], values[dtype], shares[dtype], 0) for dtype in shares}
    server.blocks = {**server.blocks, **named(WEIGHTS, weights), **named(STATE, state)}


def table_pieces(servers: ServerGroup, variable: int, rows: int = _ROWS, export_id: int = 0) -> Iterator[TableState]:
    """All rows of an embedding table with their ids, in pieces; it must not be trained meanwhile.

    With `export_id`, everything that the servers hold for that export; it may then be trained meanwhile.

    Raises `ServerReplacedError` when a server is replaced meanwhile, because its rows then have other positions.
    """
    for server in servers.known:
        link, start, total = server.link, 0, 1
        while start < total:
            request = pb.ReadTableRequest(variable=variable, start=start, count=rows, export_id=export_id)
            try:
                answer = servers.call(server, "ReadTable", request)
            except ElasticCBError:
                if server.link is link:
                    raise
            if server.link is not link:
                raise ServerReplacedError(
                    f"Parameter server {server.index} was replaced while the embedding table "
                    f"{servers.specs[variable].path!r} was being read. Read it again."
                )
            piece = tables_from(answer.tensors)[variable]
            yield piece
            start, total = start + len(piece.ids), answer.header.total


def _whole_table(servers: ServerGroup, variable: int) -> TableState:
    """The whole table at once; read again when a server is replaced."""
    while True:
        with contextlib.suppress(ServerReplacedError):
            return joined(list(table_pieces(servers, variable)))


class _WantedRows:
    """Rows of embedding tables, requested from the servers that hold them and reassembled."""

    def __init__(self, ids: Ids, servers: ServerGroup) -> None:
        self._ids = ids
        # By server and table, the positions of the server's ids among all ids.
        self._places: list[dict[int, Any]] = [{} for _ in servers.known]
        for table, own in ids.items():
            owners = servers.shard_map.server_of(own) if len(servers.known) > 1 else None
            for index, places in enumerate(self._places):
                places[table] = slice(None) if owners is None else np.flatnonzero(owners == index)

    def of_server(self, index: int) -> dict[str, Array]:
        """The arrays of its request."""
        return named(WANTED, {table: own[self._places[index][table]] for table, own in self._ids.items()})

    def found(self, answers: Sequence[Frame[Any]]) -> dict[int, Array]:
        """The rows in the servers' answers, in the order of the ids."""
        given = [by_index(TABLE, answer.tensors) for answer in answers]
        if len(given) == 1:
            return given[0]
        found: dict[int, Array] = {}
        for table, own in self._ids.items():
            first = given[0][table]
            rows = found[table] = np.empty((len(own), *first.shape[1:]), first.dtype)
            for part, places in zip(given, self._places, strict=True):
                rows[places[table]] = part[table]
        return found
