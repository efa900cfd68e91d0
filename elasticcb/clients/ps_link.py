"""The connection to one parameter server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.calls import Connection
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import Access
from elasticcb.sharding.bucket_map import BucketMap

SERVICE = "elasticcb.ParameterServer"

_METHODS = {
    "Initialize": pb.InitializeResponse,
    "Exchange": pb.ExchangeResponse,
    "SetNeighbour": pb.SetNeighbourResponse,
    "Persist": pb.PersistResponse,
    "Snapshot": pb.SnapshotResponse,
    "Save": pb.SaveResponse,
    "FinishTraining": pb.FinishTrainingResponse,
    "SetLearningRate": pb.SetLearningRateResponse,
    "Export": pb.ExportResponse,
    "LoadState": pb.LoadStateResponse,
    "ReadTable": pb.ReadTableResponse,
    "RefusedCalls": pb.RefusedCallsResponse,
    "Move": pb.MoveResponse,
}

# A server's first update may take minutes to compile, and whatever else it is asked waits for it. That a machine is
# gone is found out by gRPC's keepalive.
_DEADLINE_SECONDS = 600.0


class Places(NamedTuple):
    """Which processes are the servers, and which rows of embedding tables they hold.

    Attributes:
        addresses, ids: by index.
    """

    addresses: Sequence[str]
    ids: Sequence[int]
    buckets: BucketMap


class Link:
    """The connection to one process that is a server.

    Args:
        index: of the server.
        id: of the process.
    """

    def __init__(self, index: int, address: str, id: int, patience_seconds: float, access: Access) -> None:
        self.address, self.id = address, id
        self._connection = Connection(address, f"parameter server {index}", patience_seconds, access)
        self._calls = {
            name: self._connection.shared_frame_call(SERVICE, name, kind, often=name == "Exchange")
            for name, kind in _METHODS.items()
        }

    def call(
        self,
        method: str,
        frame: Frame[Any],
        patience_seconds: float | None = None,
        deadline_seconds: float = _DEADLINE_SECONDS,
    ) -> Frame[Any]:
        """The server's answer. A frame that is given again, after an error, is the same call, which is done once."""
        if "call" in frame.header.DESCRIPTOR.fields_by_name and not frame.header.call:
            frame.header.call = secrets.randbits(62) + 1
        answer: Frame[Any] = self._connection.call(self._calls[method], frame, deadline_seconds, patience_seconds)
        return answer

    def free_memory(self) -> None:
        self._connection.free_memory()

    def close(self) -> None:
        self._connection.close()
