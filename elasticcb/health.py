"""The standard gRPC health service, as probes of platforms call it: on a port of its own, without token and TLS.

It says of a service whether it is ready, and of the whole process (the service "") that it answers, and nothing else.
The ports of the job stay closed to those who have no token.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

from elasticcb.errors import ConnectionLostError

_THREADS = 4
_LARGEST_MESSAGE = 4096  # bytes; a check has the name of a service
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
]


class HealthServer:
    """Answers `Check` from now on.

    Args:
        host: interface to listen on.
        port: 0 takes any free one.
        service: the name of the service that the process has for its job.
        ready: whether that is ready. It is asked at each check, and must not wait for a lock.

    Attributes:
        address: "host:port".

    Raises `ConnectionLostError` when the port is taken.
    """

    def __init__(self, host: str, port: int, service: str, ready: Callable[[], bool]) -> None:
        self._server = grpc.server(ThreadPoolExecutor(_THREADS, thread_name_prefix="health"), options=_OPTIONS)
        add_HealthServicer_to_server(_Servicer({"": lambda: True, service: ready}), self._server)
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConnectionLostError(
                f"Health checks can't be answered on {host}:{port}: another process holds the port, or {host} is no "
                "address of this machine. Choose another --health_port, or 0 for any that is free."
            ) from error
        self.address = f"{host}:{bound}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0.0)


class _Servicer(HealthServicer):
    def __init__(self, services: dict[str, Callable[[], bool]]) -> None:
        self._services = services

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:
        ready = self._services.get(request.service)
        if ready is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if ready() else states.NOT_SERVING)
