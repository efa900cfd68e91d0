"""Broken calls to parameter servers: by gRPC, and by links, with the arrays in shared memory or behind the frame."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from elasticcb.master.recovery_files import RecoveryFiles
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.server import PSServer
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.link import Message
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame, encode_frame
from elasticcb.security.credentials import OPEN, Access
from elasticcb.settings import ClusterSettings, WireDtype
from elasticcb.sharding.partition import VariableSpec, pack, partition
from elasticcb.sharding.push import narrowed
from elasticcb.sharding.table_state import TableSpec
from helpers_ps import SPECS, alone, initial_values, movements, push_frame, server_settings, sgd
from mutations import ALLOWED, changed_bytes, changed_frame

TABLE = len(SPECS)
_ZEROS = '{"class_name": "Zeros", "config": {}, "module": "keras.initializers"}'
WITH_TABLE = (
    *SPECS,
    VariableSpec("table/embeddings", (0, 4), "float32", True, table=TableSpec(None, _ZEROS, 1).to_json()),
)
VALUES = [*initial_values(), np.zeros((0, 4), np.float32)]
(SLICES,) = partition(WITH_TABLE, 1, True)


@contextlib.contextmanager
def serving(folder: Path, host: str = "127.0.0.1", access: Access = OPEN) -> Iterator[list[str]]:
    """Two servers; their addresses."""
    settings = server_settings(folder, cluster=ClusterSettings(num_ps=2))
    servers = [PSServer(settings, alone(sgd), host, access=access) for _ in range(2)]
    for server in servers:
        server.start()
    try:
        yield [server.address for server in servers]
    finally:
        for server in servers:
            server.stop(0)


class Call(NamedTuple):
    """A call as it should be; to the first server or the second."""

    server: int
    method: str
    frame: Frame[Any]


class ServerFuzzer:
    """Sends broken calls to the servers at two addresses.

    Args:
        folder: that they may write checkpoints into.

    Attributes:
        codes: how often each status was the answer.
        surprises: calls that were answered by a status that is not `ALLOWED`: (method, status, words).
    """

    def __init__(self, seed: int, addresses: Sequence[str], folder: Path, access: Access = OPEN) -> None:
        self._random = random.Random(seed)
        self._addresses, self._folder = addresses, folder
        self._connections = [Connection(address, "the server", 5.0, access) for address in addresses]
        self._sides = [connection.transport_of(PS_METHODS["Exchange"]).side for connection in self._connections]
        self.codes: Counter[str] = Counter()
        self.surprises: set[tuple[str, str, str]] = set()
        self._initialize()
        self._sequences = list(self._valid())

    def _initialize(self) -> None:
        self._call(self._beginning())

    def _beginning(self) -> Call:
        tensors = {}
        for kind, trainable in (("weights", True), ("state", False)):
            blocks = pack(VALUES, WITH_TABLE, SLICES, trainable)
            tensors |= {f"{kind}/{dtype}": block for dtype, block in blocks.items()}
        header = self._model(1)
        return Call(0, "Initialize", Frame(header, tensors))

    def _model(self, num_ps: int, **more: Any) -> pb.InitializeRequest:
        variables = [spec.to_message() for spec in WITH_TABLE]
        return pb.InitializeRequest(variables=variables, num_ps=num_ps, split=True, **more)

    def _call(self, call: Call) -> Frame[Any]:
        connection = self._connections[call.server]
        answer: Frame[Any] = connection.call(replace(PS_METHODS[call.method], shared=False), call.frame)
        return answer

    # ------------------------------------------------------------ calls as they should be

    def _valid(self) -> Iterator[list[Call]]:
        rows, moved = {TABLE: (np.array([3, 1, 8]), np.ones((3, 4), np.float32))}, movements(0)
        push = push_frame(moved, SLICES, WITH_TABLE, rows, pull=True, sequence=1, state={"float32": np.ones(6, "f4")})
        push.tensors["slots/1/momentum"] = np.ones(SPECS[1].shape, np.float32)
        push.tensors["shared/iterations"] = np.int64(1)
        lookup = Frame(pb.ExchangeRequest(create_rows=True, pull=True), {f"lookup/{TABLE}": np.arange(9)})
        small = narrowed(push_frame(moved, SLICES, WITH_TABLE, rows).tensors, WireDtype.BFLOAT16)
        asked = {"pull": True, "known_version": -1}
        small_push = pb.ExchangeRequest(batches=1, base=-1, worker_id=2, sequence=1, **asked)
        small_lookup = pb.ExchangeRequest(create_rows=True, **asked)
        small_frames = Frame(small_push, small), Frame(small_lookup, lookup.tensors)
        for frame in (push, push, lookup, *small_frames):
            yield [Call(0, "Exchange", frame)]
        exported = self._call(Call(0, "Export", Frame(pb.ExportRequest(), {})))
        state = pb.LoadStateRequest(save=self._saved(0), optimizers=exported.header.optimizers)
        table = self._call(Call(0, "ReadTable", Frame(pb.ReadTableRequest(variable=TABLE, count=4), {})))
        yield [Call(0, "LoadState", Frame(state, {**exported.tensors, **table.tensors}))]
        yield [self._beginning()]
        yield [Call(0, "Save", Frame(self._saved(0), {}))]
        yield [*self._move()]
        for header in (
            pb.SnapshotRequest(evaluation_round=1),
            pb.SnapshotRequest(evaluation_round=1, release=True),
            pb.FinishTrainingRequest(),
            pb.SetLearningRateRequest(learning_rate=0.1),
            pb.ExportRequest(id=1),
            pb.ReadTableRequest(variable=TABLE, export_id=1),
            pb.ExportRequest(id=1, release=True),
            pb.SaveRequest(path=str(self._folder / "file")),
            pb.ReadTableRequest(variable=TABLE, count=4),
            pb.CountTablesRequest(top=3),
            pb.FindRowRequest(id=3),
            pb.RefusedCallsRequest(),
        ):
            yield [Call(0, type(header).__name__.removesuffix("Request"), Frame(header, {}))]

    def _move(self) -> Iterator[Call]:
        """A change to two servers."""
        for step in (pb.CLOSE, pb.DRAIN, pb.OPEN):
            pushes = [pb.PushName(worker_id=1, sequence=1)]
            yield Call(0, "Move", Frame(pb.MoveRequest(step=step, pushes=pushes), {}))
        recovery = RecoveryFiles(self._folder / "recovery", "run", WITH_TABLE)
        recovery.folder.mkdir(parents=True, exist_ok=True)
        saved = self._call(Call(0, "Save", Frame(recovery.request(0, [SLICES], 0), {}))).header
        recovery.note(0, saved, [SLICES])
        recovery.write()
        for server in (0, 1):
            manifest = json.dumps(recovery.manifest())
            given = {"index": server, "manifest": manifest, "map_version": 1, "checkpoint": str(recovery.folder)}
            yield Call(server, "Initialize", Frame(self._model(2, **given), {}))
            yield Call(server, "Save", Frame(self._saved(server, map_version=1), {}))

    def _saved(self, server: int, map_version: int = 0) -> pb.SaveRequest:
        return pb.SaveRequest(path=str(self._folder / f"ps-{server}"), after="", map_version=map_version)

    # ------------------------------------------------------------ as they are sent

    def run(self, messages: int) -> None:
        """Sends so many, or some more."""
        last = self.codes.total() + messages
        while self.codes.total() < last:
            calls = self._random.choice(self._sequences)
            broken = self._random.choice((0.1, 0.8)) if len(calls) > 1 else 0.8
            for call in calls:
                self._send(call, self._random.random() < broken)

    def _send(self, call: Call, broken: bool) -> None:
        send = self._random.choice((self._by_grpc, self._by_link))
        try:
            send(call, broken)
            code, words = grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            code, words = error.code(), error.details()
        self.codes[code.name] += 1
        if code not in ALLOWED or (code is not grpc.StatusCode.OK and not words):
            self.surprises.add((call.method, code.name, words.split("\n")[0][:200]))
            self._sides[call.server].forget()
        elif self._random.random() < 0.01:
            self._break_off(call.server)

    def _message(self, call: Call, broken: bool) -> bytes:
        header_type = getattr(pb, f"{call.method}Request")
        return changed_frame(call.frame, header_type, self._random) if broken else encode_frame(call.frame)

    def _by_grpc(self, call: Call, broken: bool) -> None:
        connection, message, path = (
            self._connections[call.server],
            self._message(call, broken),
            PS_METHODS[call.method].path,
        )
        if self._random.random() < 0.01:
            known = b'{"path": "/proc/1/fd/0", "inode": 7, "size": 65536, "key": "00ff", "socket": "elasticcb-0"}'
            message, path = changed_bytes(known, self._random), PS_METHODS[call.method].attach_path
        connection.channel.unary_unary(path)(message, timeout=30.0, metadata=connection.metadata)

    def _by_link(self, call: Call, broken: bool) -> None:
        side = self._sides[call.server]
        message = side.encode(call.frame, True)  # makes the link
        assert side.link is not None
        data = changed_bytes(message.data, self._random) if broken else message.data
        side.link.call(call.method, Message(data, message.arrays), 30.0)

    def _break_off(self, server: int) -> None:
        """What is no message comes by the link, which ends."""
        side = self._sides[server]
        if side.link is not None:
            with contextlib.suppress(OSError):  # the server has ended it meanwhile
                side.link._socket.sendall(self._random.randbytes(self._random.choice((1, 5, 6, 99, 70_000))))
            side.forget()

    def still_serves(self) -> bool:
        """Whether a server takes a model, a push and a pull, as if nothing had been."""
        self._initialize()
        frame = push_frame(movements(0), SLICES, WITH_TABLE, sequence=1, pull=True)
        answer = self._call(Call(0, "Exchange", frame))
        return answer.header.version == 1 and "weights/float32" in answer.tensors

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
