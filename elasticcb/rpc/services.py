"""The services of a job's processes, as in proto/elasticcb.proto, and how calls of their methods are handled."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from elasticcb.proto import elasticcb_pb2 as pb


@dataclass(frozen=True)
class Method:
    """A method of a service.

    Attributes:
        framed: its messages are frames; otherwise plain messages.
        request, response: its messages, or headers of the frames.
        transient: the handler keeps no array of a request after the call, so arrays need not be copied out of shared
            memory.
        control: it never waits, and is answered however many other calls run.
        shared: its frames use a link if possible.
        often: frames of the same size are sent repeatedly, so shared memory is made large enough for them.
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
        """The name used by gRPC."""
        return f"/{self.service}/{self.name}"

    @functools.cached_property
    def is_numbered(self) -> bool:
        """Whether a request carries the number of its call, so that repeated calls are executed once."""
        return "call" in self.request.DESCRIPTOR.fields_by_name

    @property
    def attach_path(self) -> str:
        """The method by which a client gets a link, or checks that the server is alive; not framed."""
        return f"/{self.service}/Attach"


def _methods(
    service: str,
    framed: bool = True,
    transient: Collection[str] = (),
    control: Collection[str] = (),
    whole: Collection[str] = (),
    often: Collection[str] = (),
) -> dict[str, Method]:
    """The methods of a service in the proto, by name; those in `whole` are not `shared`."""
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
    }


MASTER_SERVICE, PS_SERVICE = (pb.DESCRIPTOR.services_by_name[name].full_name for name in ("Master", "ParameterServer"))

LIVE_PATH, READY_PATH = "/healthz", "/readyz"  # HTTP health checks, on the port of the master's metrics

MASTER_METHODS = _methods("Master", framed=False)
NEXT_BATCH = _methods("Batches", often={"Next"})["Next"]
PS_METHODS = _methods(
    "ParameterServer",
    transient={"Exchange"},
    control={"RefusedCalls"},
    # Calls that are rare; and calls by which a master decides, whose term is checked at each call (admission.py), but
    # only once with a link.
    whole={
        "CountTables", "FindRow", "Snapshot", "Save", "FinishTraining", "SetLearningRate", "LoadState", "Move",
    },
    often={"Exchange"},
)  # fmt: skip
