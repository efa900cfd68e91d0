"""A server whose one method answers as a test has it answer, and calls of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import Method
from elasticcb.rpc.tensors import Frame

ECHO = Method("test.Echo", "Echo", pb.ExchangeRequest, pb.ExchangeResponse)


def echo(request: Frame[Any]) -> Frame[Any]:
    """The version and the tensors of the request."""
    return Frame(pb.ExchangeResponse(version=request.header.known_version), request.tensors)


def start_server(answer: Callable[[Frame[Any]], Frame[Any]] = echo, method: Method = ECHO, **options: Any) -> Server:
    """A server that runs; `options` as of `Server`."""
    server = Server(**options)
    server.add(FrameService({method: answer}))
    server.start()
    return server


def ask(connection: Connection, version: int = 0, method: Method = ECHO, **tensors: Any) -> Frame[Any]:
    return connection.call(method, Frame(pb.ExchangeRequest(known_version=version), tensors))


def link_of(connection: Connection) -> Any:
    """The link by which its calls go; None: they go by gRPC."""
    return connection.transport_of(ECHO).side.link


def link_threads() -> list[threading.Thread]:
    """Of the servers in this process: one for each socket that they answer."""
    return [thread for thread in threading.enumerate() if thread.name == "link"]
