"""A server's side of changing the number of servers: it sends its data to others while training continues.

The master leads all servers through the steps of `MoveStep`. Rows of embedding tables are copied first. Then servers
accept only pushes that some server has already applied, so that each push ends up on all servers or on none. What was
trained since the copy, and the dense part, follow; then all switch to the new map. Workers repeat refused pushes for
the new map, under the same ids.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from elasticcb.checkpoint.shard_file import Part
from elasticcb.errors import ElasticCBError, WireError
from elasticcb.optimizers.state_messages import from_tensors, to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.holder import Holder
from elasticcb.ps.reslice import PartSlices, cut, overlap, put_together
from elasticcb.ps.served_model import MoveGate, ServedModel
from elasticcb.ps.table_snapshot import CHUNK_BYTES
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Array, Frame, dtype_of
from elasticcb.security.credentials import Access
from elasticcb.sharding.array_names import AGES, HELD, WEIGHT, by_index, named, without
from elasticcb.sharding.bucket_map import BucketMap
from elasticcb.sharding.partition import MOST_SERVERS, VariableSpec, partition
from elasticcb.sharding.table_state import from_tensors as tables_from
from elasticcb.sharding.table_state import to_tensors as tables_to

_PATIENCE_SECONDS = 3.0
_DEADLINE_SECONDS = 600.0

MakeModel = Callable[[pb.InitializeRequest], ServedModel]


class Move:
    """One change of the number of servers, from the view of one of them.

    Args:
        request: request of the step PREPARE.
        model: the current model; None: the server is new.

    Attributes:
        next: the model to serve after the move; None: the server leaves.
    """

    def __init__(
        self, request: pb.MoveRequest, model: ServedModel | None, make_model: MakeModel, lock: Any, access: Access
    ) -> None:
        target = request.model
        self.version = target.map_version
        self._lock, self._model = lock, model
        self._index, self._servers_before = target.index, request.servers_before
        self._specs = [VariableSpec.from_message(variable) for variable in target.variables]
        counts = request.servers_before, target.num_ps
        if not 1 <= min(counts) <= max(counts) <= MOST_SERVERS or not 0 <= target.index < max(counts):
            raise WireError(
                f"A move from {request.servers_before} to {target.num_ps} servers has server {target.index}."
            )
        if len(target.ps_addresses) < target.num_ps:
            raise WireError(f"A move to {target.num_ps} servers has {len(target.ps_addresses)} addresses.")
        if model is not None and [_kind(spec) for spec in self._specs] != [_kind(spec) for spec in model.specs]:
            raise WireError("A move has other variables than this server.")
        self._before = partition(self._specs, request.servers_before, target.split)
        self._after = partition(self._specs, target.num_ps, target.split)
        self.buckets = BucketMap.from_bytes(target.num_ps, target.buckets, target.map_version)
        leaves = target.index >= target.num_ps
        self.next = None if leaves else make_model(target)
        self._peers = {
            place: Connection(address, f"parameter server {place}", _PATIENCE_SECONDS, access)
            for place, address in enumerate(target.ps_addresses)
            if place != target.index
        }
        self._sent = 0  # number of messages
        self._since = -1  # version from which rows must be sent again
        self._own: PartSlices | None = None
        self._receiving = threading.Lock()
        self._received: dict[int, int] = {}  # by server, the number of its last message
        self._pieces: dict[int, PartSlices] = {}  # by server
        self._held: dict[tuple[int, int], Array] = {}  # by server and table, ids of the rows it hands over
        self._taken: dict[int, int] = {}

    # -------------------------------------------------------------- sending

    def copy(self) -> tuple[int, int]:
        """Sends the rows that will belong to others; after the first call, only those trained since the previous one.
        Returns their number and bytes. Training continues."""
        if self._model is None:
            return 0, 0
        tables = self._model.parameters.tables
        with self._lock:
            since, self._since = self._since, self._model.parameters.version
            ids = {number: tables[number].ids(since) for number in tables.numbers}
        rows = size = 0
        for number, own in ids.items():
            owners = self.buckets.server_of(own)
            for place in np.unique(owners[owners != self._index]).tolist():
                going = own[owners == place]
                chunk = max(1, CHUNK_BYTES // tables[number].row_bytes)
                for first in range(0, len(going), chunk):
                    with self._lock:
                        state = tables[number].select(going[first : first + chunk])
                    rows += len(state.ids)
                    size += self._send(place, tables_to({number: state}))
        return rows, size

    def hand_over(self, taken: Mapping[int, int]) -> int:
        """Sends rows trained since the copy, and the dense part; returns the bytes. The model no longer changes."""
        self._taken = dict(taken)
        if self._model is None:
            return 0
        with self._lock:
            parameters = self._model.parameters
            part = parameters.dense()
            trained = parameters.tables.export(self._since - 1)
            ids = {number: parameters.tables[number].ids() for number in parameters.tables.numbers}
        whole = PartSlices(self._model.slices, part)
        size = 0
        for place, slices in enumerate(self._after):
            piece = cut(whole, slices, self._specs)
            # Old servers keep their own shared variables; the others get those of the first server.
            if place == self._index or (self._index == 0 and place >= self._servers_before):
                piece.part.shared, piece.part.optimizer, piece.part.ages = part.shared, part.optimizer, part.ages
            if place == self._index:
                self._own = piece
                continue
            owns = functools.partial(self.buckets.owns, place)
            states = {number: state.select(owns(state.ids)) for number, state in trained.items()}
            tensors = named(HELD, {number: ids[number][owns(ids[number])] for number in states})
            tensors |= named(WEIGHT, piece.part.weights) | named(AGES, piece.part.ages)
            tensors |= to_tensors(piece.part.optimizers)
            size += self._send(place, tensors | tables_to(states), last=True, optimizer=piece.part.optimizer)
        return size

    def _send(self, place: int, tensors: dict[str, Array], **header: Any) -> int:
        self._sent += 1
        request = pb.ReceiveRequest(map_version=self.version, sender=self._index, number=self._sent, **header)
        self._peers[place].call(PS_METHODS["Receive"], Frame(request, tensors), _DEADLINE_SECONDS)
        return sum(array.nbytes for array in tensors.values())

    # -------------------------------------------------------------- receiving

    def receive(self, frame: Frame[pb.ReceiveRequest]) -> None:
        """Stores data sent by another server; retries are ignored."""
        sender = frame.header.sender
        with self._receiving:
            if self._received.get(sender, 0) >= frame.header.number:
                return
            weights, held = by_index(WEIGHT, frame.tensors), by_index(HELD, frame.tensors)
            rest = without(frame.tensors, WEIGHT, HELD)
            if self.next is None or not 0 <= sender < len(self._before):
                raise WireError(f"Server {self._index} expects no data from server {sender} in this move.")
            tables = self.next.parameters.tables
            for table, rows in tables_from(rest).items():
                tables.check_ids(table, rows.ids)
                tables[table].put(rows)
            for table, ids in held.items():
                if ids.ndim != 1 or ids.dtype != np.int64:
                    raise WireError(f"Server {sender} sent ids as {ids.dtype} {list(ids.shape)}; expected int64 [n].")
                self._held[sender, table] = ids
            if frame.header.last:
                self._pieces[sender] = self._piece_of(sender, weights, rest, frame.header.optimizer)
            self._received[sender] = frame.header.number

    def _piece_of(
        self, sender: int, weights: dict[int, Array], rest: Mapping[str, Array], optimizer: str
    ) -> PartSlices:
        slices = overlap(self._before[sender], self._after[self._index])
        for each in slices:
            spec = self._specs[each.variable]
            expected, given = each.shape(spec), weights.get(each.variable)
            if given is None or given.shape != expected or given.dtype != dtype_of(spec.dtype):
                raise WireError(
                    f"Server {sender} sent {'nothing' if given is None else f'{given.dtype} {list(given.shape)}'} for "
                    f"{spec.path!r}; expected {spec.dtype} {list(expected)}."
                )
        state = from_tensors(without(rest, AGES))
        ages = by_index(AGES, rest)
        return PartSlices(slices, Part(0, weights, state.slots, state.extras, state.shared, optimizer, ages=ages))

    def settle(self, version: int) -> None:
        """Assembles the new model of this server, as `version` of the model."""
        if self.next is None:
            return
        pieces = [piece for piece in [self._own, *self._pieces.values()] if piece is not None]
        part = put_together(pieces, self._after[self._index], self._specs)
        parameters = self.next.parameters
        parameters.check_state(part.optimizers)
        parameters.load(part.weights, part.optimizers, version)
        parameters.tables.restore_ages(part.ages, version)
        self.next.taken.update(self._taken)
        for number in parameters.tables.numbers:
            held = [ids for (_, table), ids in self._held.items() if table == number]
            parameters.tables[number].keep(np.concatenate([np.empty(0, np.int64), *held]))

    def open(self) -> None:
        """Moves the tables into the new model. The lock must be held; this can't fail."""
        if self.next is None or self._model is None:
            return
        tables = self.next.parameters.tables
        for number in tables.numbers:
            tables[number].take_over(
                self._model.parameters.tables[number], lambda ids: self.buckets.owns(self._index, ids)
            )
        self.next.rate_version, self.next.slots_version = self._model.rate_version, self._model.slots_version
        self.next.loaded = self._model.loaded

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._peers.values():
            connection.close()


def _kind(spec: VariableSpec) -> tuple[object, ...]:
    return spec.path, spec.shape, spec.dtype, spec.trainable


class Moves:
    """Handles the calls of a move."""

    def __init__(self, holder: Holder, access: Access) -> None:
        self._holder, self._access = holder, access
        self._move: Move | None = None
        self._target = pb.InitializeRequest()
        self._steps: dict[int, Callable[[pb.MoveRequest, Move], pb.MoveResponse]] = {
            pb.COPY: self._copy,
            pb.CLOSE: self._close,
            pb.DRAIN: self._drain,
            pb.HAND_OVER: self._hand_over,
            pb.SETTLE: self._settle,
            pb.OPEN: self._open,
            pb.ABANDON: self._abandon,
        }

    def move(self, frame: Frame[pb.MoveRequest]) -> Frame[Any]:
        request = frame.header
        if request.step == pb.PREPARE:
            self._drop()
            self._move = Move(request, self._holder.model, self._holder.empty_model, self._holder.lock, self._access)
            self._target = request.model
            return Frame(pb.MoveResponse(), {})
        if request.step == pb.WRITE:
            self._holder.write_down()
            return Frame(pb.MoveResponse(), {})
        if request.step == pb.FORGET:
            self._holder.forget_older(request.map_version)
            return Frame(pb.MoveResponse(), {})
        if request.step not in self._steps:
            raise WireError(f"A move has no step {request.step}.")
        move = self._move
        if move is None or move.version != request.map_version:
            model = self._holder.model
            if request.step == pb.ABANDON or (request.step == pb.OPEN and model is not None):  # a retry
                return Frame(pb.MoveResponse(), {})
            raise ElasticCBError(f"This server takes no part in a move to map {request.map_version}.")
        return Frame(self._steps[request.step](request, move), {})

    def receive(self, frame: Frame[pb.ReceiveRequest]) -> Frame[Any]:
        move = self._move
        if move is None or move.version != frame.header.map_version:
            raise ElasticCBError(f"This server takes no part in a move to map {frame.header.map_version}.")
        move.receive(frame)
        return Frame(pb.ReceiveResponse(), {})

    def _copy(self, request: pb.MoveRequest, move: Move) -> pb.MoveResponse:
        rows, size = move.copy()
        self._holder.write_down()  # so that little is lost if a server is lost now
        return pb.MoveResponse(rows=rows, bytes=size)

    def _close(self, request: pb.MoveRequest, move: Move) -> pb.MoveResponse:
        with self._holder.lock:
            model = self._holder.model
            if model is None:
                return pb.MoveResponse()
            model.gate = model.gate or MoveGate()
            model.flush()
            return pb.MoveResponse(pushes=_names(model.taken.items()), version=model.parameters.version)

    def _drain(self, request: pb.MoveRequest, move: Move) -> pb.MoveResponse:
        with self._holder.lock:
            model = self._holder.model
            if model is None or model.gate is None:
                return pb.MoveResponse()
            model.gate.allowed = {push.worker_id: push.sequence for push in request.pushes}
            return pb.MoveResponse(pushes=_names(model.gate.missing(model.taken)))

    def _hand_over(self, request: pb.MoveRequest, move: Move) -> pb.MoveResponse:
        size = move.hand_over({push.worker_id: push.sequence for push in request.pushes})
        model = self._holder.model
        return pb.MoveResponse(bytes=size, version=model.parameters.version if model is not None else 0)

    def _settle(self, request: pb.MoveRequest, move: Move) -> pb.MoveResponse:
        move.settle(request.version)
        return pb.MoveResponse()

    def _open(self, request: pb.MoveRequest, move: Move) -> pb.MoveResponse:
        with self._holder.lock:
            model = self._holder.model
            move.open()
            if move.next is not None:
                self._holder.serve(move.next, self._target)
            elif model is not None:
                model.buckets, model.gate = move.buckets, None  # so that it reports a new map
        self._drop()
        return pb.MoveResponse(version=request.version)

    def _abandon(self, request: pb.MoveRequest, move: Move) -> pb.MoveResponse:
        with self._holder.lock:
            model = self._holder.model
            if model is not None:
                model.gate = None
        self._drop()
        return pb.MoveResponse()

    def _drop(self) -> None:
        move, self._move = self._move, None
        if move is not None:
            move.close()


def _names(pushes: Iterable[tuple[int, int]]) -> list[pb.PushName]:
    return [pb.PushName(worker_id=worker, sequence=sequence) for worker, sequence in pushes]
