"""The standard gRPC health service for platform probes: on a port of its own, without token and TLS.

It reports whether a service is ready, and that the whole process (service "") answers, and nothing else. The job's
ports stay closed to callers without the token.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from elasticcb.errors import UsageError

_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),  # bytes; a check only has the name of a service
    # Requests that never end come from strangers: they end with their connection.
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.server_handshake_timeout_ms", 2_000),
    ("grpc.max_connection_age_ms", 30_000),
    ("grpc.max_connection_age_grace_ms", 10_000),
]


class HealthServer:
    """Starts answering `Check`.

    Raises `UsageError` when the port is taken.
    """

    def __init__(self, host: str, port: int, service: str, ready: Callable[[], bool]) -> None:
        # In this server, a partially received request occupies no thread, unlike in gRPC's other server.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="health", daemon=True)
        self._thread.start()
        try:
            self._server, bound = self._run(_started(f"{host}:{port}", {"": lambda: True, service: ready}))
        except RuntimeError as error:
            self._end()
            raise UsageError(
                f"Could not serve health checks on {host}:{port}: another process uses the port, or {host} is not an "
                "address of this machine. Choose another health_port, or 0 for any free one."
            ) from error
        self.address = f"{host}:{bound}"

    def stop(self) -> None:
        self._run(self._server.stop(0.0))
        self._end()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _started(address: str, services: Mapping[str, Callable[[], bool]]) -> tuple[Any, int]:
    """A server, and the port on which it listens."""
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((_handler(services),))
    bound = server.add_insecure_port(address)
    await server.start()
    return server, bound


def _handler(services: Mapping[str, Callable[[], bool]]) -> grpc.GenericRpcHandler:
    """Handles only `Check`. It parses messages itself, because gRPC logs a traceback for each unreadable message and
    for each unimplemented method, and anybody can make such calls."""

    async def check(message: bytes, context: Any) -> bytes:
        try:
            service = health_pb2.HealthCheckRequest.FromString(message).service
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message can't be read")
        ready = services.get(service)
        if ready is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
            raise AssertionError("abort raises")
        states = health_pb2.HealthCheckResponse
        answer: bytes = states(status=states.SERVING if ready() else states.NOT_SERVING).SerializeToString()
        return answer

    handlers = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)
