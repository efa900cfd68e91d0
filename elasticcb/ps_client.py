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

from elasticcb.errors import ConnectionLostError, ElasticCBError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.partition import Slice, VariableSpec, pack, partition, unpack
from elasticcb.rpc import Connection
from elasticcb.shared_memory import aligned_copy
from elasticcb.table_spec import server_of
from elasticcb.table_state import TableState, joined
from elasticcb.tensors import Array, Frame, dtype_of

logger = logging.getLogger(__name__)

SERVICE = "elasticcb.ParameterServer"

Blocks = list[dict[str, Array]]  # by server: "weights/DTYPE" and "state/DTYPE", flat
Ids = Mapping[int, Array]  # by embedding table, unique int64 [n]

_METHODS = {
    "Initialize": pb.InitializeResponse,
    "Exchange": pb.ExchangeResponse,
    "Snapshot": pb.SnapshotResponse,
    "Save": pb.SaveResponse,
    "FinishTraining": pb.FinishTrainingResponse,
    "SetLearningRate": pb.SetLearningRateResponse,
    "Export": pb.ExportResponse,
    "LoadState": pb.LoadStateResponse,
    "ReadTable": pb.ReadTableResponse,
}

# A server's first update may take minutes to compile, and whatever else it is asked waits for it. That a machine is
# gone is found out by gRPC's keepalive.
_DEADLINE_SECONDS = 600.0
_PAUSE_SECONDS = 0.1  # before a server that does not answer, and is not replaced, is asked again


@dataclass
class Push:
    """What a training step hands to the servers.

    Attributes:
        gradients: by server and dtype, the dense gradients of `dense_variables`, flat.
        dense_variables: indices of the variables whose gradients `gradients` holds.
        rows: by variable index, unique row ids (int64, of the whole variable or table) and their gradients.
        state_deltas: by server and dtype, what the step added to the non-trainable variables, flat.
        loss: of the batch.
        non_finite: what holds NaN or infinity, in words: "the loss", "the gradient of 'dense/kernel'"; "" if
            nothing does.
    """

    gradients: list[dict[str, Array]]
    dense_variables: tuple[int, ...]
    rows: dict[int, tuple[Array, Array]]
    state_deltas: list[dict[str, Array]]
    loss: float
    non_finite: str = ""


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


class ServerReplacedError(ElasticCBError):
    """A server was replaced in the midst of calls that belong together."""


class Link:
    """The connection to one process that is a server.

    Args:
        index: of the server.
        id: of the process.
    """

    def __init__(self, index: int, address: str, id: int, patience_seconds: float, token: str) -> None:
        self.address, self.id = address, id
        self._connection = Connection(address, f"parameter server {index}", patience_seconds, token)
        self._calls = {name: self._connection.shared_frame_call(SERVICE, name, kind) for name, kind in _METHODS.items()}

    def call(self, method: str, frame: Frame[Any], patience_seconds: float | None = None) -> Frame[Any]:
        answer: Frame[Any] = self._connection.call(self._calls[method], frame, _DEADLINE_SECONDS, patience_seconds)
        return answer

    def free_memory(self) -> None:
        self._connection.free_memory()

    def close(self) -> None:
        self._connection.close()


@dataclass
class Server:
    """One server as its client knows it."""

    index: int
    slices: Sequence[Slice]
    link: Link
    moving: threading.Lock = field(default_factory=threading.Lock)
    blocks: dict[str, Array] = field(default_factory=dict)
    version: int = -1
    state_version: int = -1
    rows: dict[int, Array] = field(default_factory=dict)  # of embedding tables, that the last exchange brought


class PSClient:
    """All parameter servers of a job as one.

    Args:
        addresses: of the servers, by index.
        specs: the model's weights.
        split: whether variables may be cut between servers.
        client_id: the worker's id; names the origin of pushes.
        synchronous: pushes to several servers then are staged, and decided by the first server.
        token: of the job.
        ids: of the servers' processes, by index.
        find: by index, the address and the id of the process that is the server now. It is asked when a call gets no
            answer, and waits while a lost server is replaced; calls then go on with the new one. None: servers are
            not replaced.

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
        token: str = "",
        ids: Sequence[int] = (),
        find: Callable[[int], tuple[str, int]] | None = None,
    ) -> None:
        self.specs = list(specs)
        self.partition = partition(self.specs, len(addresses), split)
        self.split = split
        self.version = 0  # of the model, as the first server counts it
        self.learning_rate = 0.0  # the base rate
        self.learning_rate_version = -1  # rises when the master sets the base rate
        self.snapshot_version = 0  # of the weights that `pull_snapshot` fetched last
        self._client_id = client_id
        self._exchanging = threading.RLock()  # a worker may push in one thread and pull in another
        self._staged = synchronous and len(addresses) > 1
        self._sequence = 0
        self._patience, self._token, self._find = patience_seconds, token, find
        self._closed = False
        links = [self._link(*place) for place in enumerate(zip(addresses, ids or [0] * len(addresses), strict=True))]
        self._servers = [Server(*known) for known in zip(range(len(links)), self.partition, links, strict=True)]
        self._pool = ThreadPoolExecutor(len(addresses), thread_name_prefix="ps-client")

    def _link(self, index: int, place: tuple[str, int]) -> Link:
        return Link(index, *place, self._patience, self._token)

    @property
    def blocks(self) -> Blocks:
        """The newest weights pulled."""
        return [server.blocks for server in self._servers]

    def pull(self) -> Blocks:
        """Fetches what is newer than the weights at hand."""
        with self._exchanging:
            self._exchange(self._servers, [self._request(server, None, pull=True) for server in self._servers])
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
            return self._lookup(ids, create, evaluation_round, pull)

    def _lookup(self, ids: Ids, create: bool, evaluation_round: int, pull: bool) -> dict[int, Array]:
        frames = []
        asked = self._split(ids)
        for server, wanted in zip(self._servers, asked, strict=True):
            header = self._request(server, None, pull).header
            header.create_rows, header.snapshot = create, evaluation_round
            frames.append(Frame(header, {f"lookup/{index}": own for index, (own, _) in wanted.items()}))
        if evaluation_round:  # whose version is not the present one
            answers = list(self._pool.map(self._call_frame, self._servers, frames))
            for server, answer in zip(self._servers, answers, strict=True):
                server.rows = _rows_in(answer)
        else:
            self._exchange(self._servers, frames)
        return self._rows_found(ids, asked)

    def read_table(self, variable: int, chunk_rows: int = 65_536) -> Iterator[tuple[Array, Array]]:
        """All (ids [n], rows [n, dim]) of an embedding table, in pieces; nobody must be training it meanwhile.

        Raises `ServerReplacedError` when a server is replaced meanwhile: its rows have other places then.
        """
        for server in self._servers:
            link, start, total = server.link, 0, 1
            while start < total:
                request = pb.ReadTableRequest(variable=variable, start=start, count=chunk_rows)
                answer = self._call(server, "ReadTable", request)
                if server.link is not link:
                    raise ServerReplacedError(
                        f"Parameter server {server.index} was replaced while the embedding table "
                        f"{self.specs[variable].path!r} was read. Read it again."
                    )
                yield answer.tensors["ids"], answer.tensors["rows"]
                start, total = start + chunk_rows, answer.header.total

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
                return joined([TableState(*piece) for piece in self.read_table(variable)])

    def pull_snapshot(self, evaluation_round: int) -> Blocks:
        """The weights that the servers keep for an evaluation round; `snapshot_version` is theirs."""

        def pull(server: Server) -> Frame[Any]:
            request = pb.ExchangeRequest(pull=True, known_version=-1, known_state_version=-1, snapshot=evaluation_round)
            return self._call(server, "Exchange", request)

        answers = list(self._pool.map(pull, self._servers))
        self.snapshot_version = answers[0].header.version
        # They are kept while others come.
        return [{name: aligned_copy(block) for name, block in answer.tensors.items()} for answer in answers]

    def push(self, push: Push, learning_rate: float | None, pull: bool = True, ids: Ids | None = None) -> PushResult:
        """Hands over the gradients of one step on `blocks`, and by default fetches the weights after it.

        Args:
            learning_rate: for this push only; None takes the servers' base rate.
            ids: of embedding tables, by variable: whose rows after the update to fetch along (`create`d, as in
                training); unique int64 [n].
        """
        with self._exchanging:
            return self._push(push, learning_rate, pull, ids or {})

    def _push(self, push: Push, learning_rate: float | None, pull: bool, ids: Ids) -> PushResult:
        asked = self._split(ids)
        self._sequence += 1
        # Staged pushes change the other servers only once the first one has decided.
        pull_along = pull and not self._staged
        # While an update goes from server to server, a pull may find them at different versions.
        oldest = min(server.version for server in self._servers) if self._staged else None
        frames = []
        for index, server in enumerate(self._servers):
            header = self._request(server, push, pull_along).header
            header.version = server.version if oldest is None else oldest
            header.staged = self._staged and index > 0
            if learning_rate is not None:
                header.learning_rate = learning_rate
                header.has_learning_rate = True
            tensors = {f"gradients/{dtype}": flat for dtype, flat in push.gradients[index].items()}
            tensors |= {f"state/{dtype}": flat for dtype, flat in push.state_deltas[index].items()}
            tensors |= self._rows_of(server, index, push.rows)
            if not self._staged:
                header.create_rows = True
                tensors |= {f"lookup/{table}": own for table, (own, _) in asked[index].items()}
            frames.append(Frame(header, tensors))
        first = 1 if self._staged else 0
        headers = self._exchange(self._servers[first:], frames[first:])
        refused = next((header for header in headers if header.status == pb.NON_FINITE), None)
        if self._staged and refused is None:
            headers = self._exchange(self._servers[:1], frames[:1])
        decided = refused or headers[0]
        result = PushResult(decided.status, decided.reason, self.version)
        if not self._staged:
            result.rows.update(self._rows_found(ids, asked))
        elif pull and ids:
            result.rows.update(self.lookup(ids, create=True, pull=True))
        elif pull:
            self.pull()
        return result

    def _request(self, server: Server, push: Push | None, pull: bool) -> Frame[Any]:
        header = pb.ExchangeRequest(
            worker_id=self._client_id,
            pull=pull,
            known_version=server.version,
            known_state_version=server.state_version,
        )
        if push is not None:
            header.sequence = self._sequence
            header.dense_variables.extend(push.dense_variables)
            header.row_variables.extend(push.rows)
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
            owners = server_of(own, count)
            for index, part in enumerate(parts):
                places = np.flatnonzero(owners == index)
                part[table] = own[places], places
        return parts

    def _rows_found(self, ids: Ids, asked: Sequence[Mapping[int, tuple[Array, Any]]]) -> dict[int, Array]:
        """The rows that the last exchange has brought, in the order of `ids`."""
        if len(self._servers) == 1:
            return {table: self._servers[0].rows[table] for table in ids}
        found: dict[int, Array] = {}
        for table, own in ids.items():
            first = self._servers[0].rows[table]
            rows = found[table] = np.empty((len(own), *first.shape[1:]), first.dtype)
            for server, part in zip(self._servers, asked, strict=True):
                rows[part[table][1]] = server.rows[table]
        return found

    def _rows_of(self, server: Server, index: int, rows: Mapping[int, tuple[Array, Array]]) -> dict[str, Array]:
        tensors: dict[str, Array] = {}
        for variable, (ids, values) in rows.items():
            if self.specs[variable].table:
                if len(self._servers) > 1:
                    places = np.flatnonzero(server_of(ids, len(self._servers)) == index)
                    ids, values = ids[places], values[places]
                tensors[f"rows/{variable}/ids"], tensors[f"rows/{variable}/values"] = ids, values
        for part in server.slices:
            if part.variable not in rows:
                continue
            ids, values = rows[part.variable]
            first, last = part.row_range(self.specs[part.variable])
            here: Any = (ids >= first) & (ids < last)
            if here.all():
                here = slice(None)  # a view instead of a copy
            tensors[f"rows/{part.variable}/ids"] = ids[here] - first
            tensors[f"rows/{part.variable}/values"] = values[here]
        return tensors

    def _exchange(self, servers: Sequence[Server], frames: Sequence[Frame[Any]]) -> list[Any]:
        if len(servers) == 1:
            answers = [self._call_frame(servers[0], frames[0])]
        else:
            answers = list(self._pool.map(self._call_frame, servers, frames))
        for server, frame, answer in zip(servers, frames, answers, strict=True):
            header = answer.header
            if server is self._servers[0]:
                self.version, self.learning_rate = header.version, header.learning_rate
                self.learning_rate_version = header.base_learning_rate_version
            if frame.header.pull:
                server.version, server.state_version = header.version, header.state_version
            server.rows = _rows_in(answer)
            if len(answer.tensors) > len(server.rows):
                blocks = {name: block for name, block in answer.tensors.items() if not name.startswith("table/")}
                server.blocks = {**server.blocks, **_kept(blocks)}
        return [answer.header for answer in answers]

    def _call(self, server: Server, method: str, header: Any) -> Frame[Any]:
        return self._call_frame(server, Frame(header, {}), method)

    def _call_frame(self, server: Server, frame: Frame[Any], method: str = "Exchange") -> Frame[Any]:
        if self._find is None:
            return server.link.call(method, frame)
        begun = time.monotonic()
        while True:
            link = server.link
            try:
                return link.call(method, frame, patience_seconds=0.0)
            except ConnectionLostError:
                if self._closed:
                    raise
                if self._moved(server, link):
                    begun = time.monotonic()
                    if method == "Exchange":
                        frame.header.known_version = frame.header.known_state_version = -1
                elif time.monotonic() - begun > self._patience:
                    raise
                else:
                    time.sleep(_PAUSE_SECONDS)

    def _moved(self, server: Server, failed: Link) -> bool:
        """Whether another process is the server now, which has taken the place of the one that `failed`."""
        with server.moving:
            if server.link is not failed:
                return True
            assert self._find is not None
            return self._follow(server, *self._find(server.index))

    def _follow(self, server: Server, address: str, id: int) -> bool:
        """Speaks to another process from now on, if it is another one; returns whether it is."""
        if id == server.link.id:
            return False
        logger.info("Parameter server %d is at %s now", server.index, address)
        before, server.link = server.link, self._link(server.index, (address, id))
        # The new one counts for itself.
        server.version = server.state_version = -1
        before.close()
        return True

    def close(self) -> None:
        """Ends all connections."""
        self._closed = True
        self._pool.shutdown(wait=False)
        for server in self._servers:
            server.link.close()


def _rows_in(answer: Frame[Any]) -> dict[int, Array]:
    """By embedding table, the rows in an answer."""
    return {int(name.partition("/")[2]): rows for name, rows in answer.tensors.items() if name.startswith("table/")}


def _kept(blocks: Mapping[str, Array]) -> dict[str, Array]:
    """Blocks as they may be kept: those of state, which rarely change, would keep the memory of the whole answer."""
    return {name: aligned_copy(block) if name.startswith("state/") else block for name, block in blocks.items()}


def pack_weights(weights: Sequence[Array], specs: Sequence[VariableSpec], slices: Sequence[Slice]) -> dict[str, Array]:
    """One server's part of `weights`, as it travels."""
    trainable = pack(weights, specs, slices, trainable=True)
    state = pack(weights, specs, slices, trainable=False)
    return {f"weights/{d}": flat for d, flat in trainable.items()} | {f"state/{d}": flat for d, flat in state.items()}


def unpack_weights(blocks: Blocks, specs: Sequence[VariableSpec], parts: Sequence[Sequence[Slice]]) -> list[Array]:
    """The whole weights from all servers' blocks, in the order of `specs`; none of the rows of embedding tables."""
    weights = [np.empty((0, *spec.shape[1:]) if spec.table else spec.shape, dtype_of(spec.dtype)) for spec in specs]
    for server, slices in zip(blocks, parts, strict=True):
        for prefix, trainable in (("weights/", True), ("state/", False)):
            found = {key.removeprefix(prefix): flat for key, flat in server.items() if key.startswith(prefix)}
            unpack(found, specs, slices, trainable, weights)
    return weights
