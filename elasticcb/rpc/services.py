"""The services of a job's processes, as proto/elasticcb.proto has them, and how calls of their methods are treated."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from elasticcb.proto import elasticcb_pb2 as pb

_PIECE = "Piece"


@dataclass(frozen=True)
class Method:
    """A method of a service.

    Attributes:
        framed: its messages are frames; else they are plain messages.
        service: its full name.
        request, response: its messages, or the headers of the frames.
        transient: the handler keeps no array of a request beyond the call, so that none has to be copied out of shared
            memory.
        control: it waits for nothing. However many other calls run, it is answered.
        shared: its frames go by shared memory where they can.
        often: frames of the same size travel again and again, so that shared memory for a large one pays.
    """

    service: str
    name: str
    request: type[Any]
    response: type[Any]
    framed: bool = True
    transient: bool = False
    control: bool = False
    shared: bool = True
    often: bool = True

    @functools.cached_property
    def path(self) -> str:
        """As gRPC names it."""
        return f"/{self.service}/{self.name}"

    @functools.cached_property
    def is_numbered(self) -> bool:
        """Whether a request carries the number of its call, by which a repeated one is done once."""
        return "call" in self.request.DESCRIPTOR.fields_by_name

    @functools.cached_property
    def piece(self) -> Method:
        """The method of the same service by which arrays go that are too large for a frame (frame_pieces.py)."""
        return Method(
            self.service, _PIECE, pb.PieceRequest, pb.PieceResponse, transient=True, control=True, shared=self.shared
        )

    @property
    def attach_path(self) -> str:
        """By which a client shows its shared memory, or asks whether the server is alive; not by frames."""
        return f"/{self.service}/Attach"


def _methods(
    service: str,
    framed: bool = True,
    transient: Collection[str] = (),
    control: Collection[str] = (),
    whole: Collection[str] = (),
    often: Collection[str] = (),
) -> dict[str, Method]:
    """The methods of a service of the proto, by name, but `Method.piece`; those of `whole` are not `shared`."""
    described = pb.DESCRIPTOR.services_by_name[service]
    return {
        method.name: Method(
            described.full_name,
            method.name,
            getattr(pb, method.input_type.name),
            getattr(pb, method.output_type.name),
            framed=framed,
            transient=method.name in transient,
            control=method.name in control,
            shared=framed and method.name not in whole,
            often=method.name in often,
        )
        for method in described.methods
        if method.name != _PIECE
    }


MASTER_SERVICE, PS_SERVICE = (pb.DESCRIPTOR.services_by_name[name].full_name for name in ("Master", "ParameterServer"))

LIVE_PATH, READY_PATH = "/healthz", "/readyz"  # of health checks by HTTP, on the port of the master's metrics

MASTER_METHODS = _methods("Master", framed=False)
NEXT_BATCH = _methods("Batches", often={"Next"})["Next"]
PS_METHODS = _methods(
    "ParameterServer",
    transient={"Exchange"},
    # A push may wait for the neighbour, which answers however many pushes wait there.
    control={"Replicate", "ReadLog", "RefusedCalls"},
    # What goes once, or is large: memory for it would be kept. And what a master decides: its term is looked at with
    # each call (admission.py), but for shared memory, of which it is looked at once.
    whole={
        *("ReadLog", "Receive", "CountTables", "FindRow"),
        *(
            "SetNeighbour",
            "Persist",
            "Snapshot",
            "Save",
            "FinishTraining",
            "SetLearningRate",
            "LoadState",
            "Move",
        ),
    },
    often={"Exchange", "Replicate"},
)
