"""The standard gRPC health service, as probes of platforms call it: on a port of its own, without token and TLS.

It says of a service whether it is ready, and of the whole process (the service "") that it answers, and nothing else.
The ports of the job stay closed to those who have no token.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

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
        self._server.add_generic_rpc_handlers((_handler({"": lambda: True, service: ready}),))
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


def _handler(services: dict[str, Callable[[], bool]]) -> grpc.GenericRpcHandler:
    """Answers `Check` alone. It reads the messages itself: gRPC logs a traceback for each that can't be read, and for
    each call of a method that only its stub has, and these calls are anybody's."""

    def check(message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            service = health_pb2.HealthCheckRequest.FromString(message).service
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message can't be read")
        ready = services.get(service)
        if ready is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        states = health_pb2.HealthCheckResponse
        answer: bytes = states(status=states.SERVING if ready() else states.NOT_SERVING).SerializeToString()
        return answer

    handlers = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)
