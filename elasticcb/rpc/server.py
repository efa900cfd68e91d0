"""gRPC servers of this project: on free ports or in socket folders, with separate threads for calls that never wait;
and the standard gRPC health service for platform probes, on a port of its own, without token and TLS.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from elasticcb.errors import ElasticCBError, UsageError
from elasticcb.process.system import most_connections
from elasticcb.rpc.admission import CallThreads, Gate, RefusedCalls
from elasticcb.rpc.call_errors import abort, call_error_of
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.services import Method
from elasticcb.rpc.transport import OPTIONS, message_limit
from elasticcb.security.credentials import OPEN, Access
from elasticcb.security.socket_folder import address_of, free_port, is_folder
from elasticcb.security.tls import TLS, Certificate

_CONTROL_THREADS = 8  # for calls that never wait
_HANDSHAKE = ("grpc.server_handshake_timeout_ms", 10_000)
# Idle timeout of a connection. A process of the job reconnects when needed.
_IDLE = ("grpc.max_connection_idle_ms", 60_000)


class Server:
    """A gRPC server on a free port. It answers calls with its `PROTOCOL` number.

    Args:
        host: interface to listen on, or a folder of sockets.
        threads: how many calls it answers at once; a long poll occupies one all the time. Calls that never wait have
            other threads.
        access: credentials that calls must carry, and by which the server identifies itself.
        largest_message: maximum size of a message in bytes; -1: the limit of gRPC.

    Raises `UsageError` when the port is taken, or other users can access the folder.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        threads: int = 16,
        access: Access = OPEN,
        largest_message: int = -1,
    ) -> None:
        self._pool = CallThreads(threads)
        self.refused = RefusedCalls()
        self._control_pool = CallThreads(_CONTROL_THREADS)
        self._control: set[str] = set()  # answered methods: "/SERVICE/METHOD"
        gate = Gate(access.token, self._pool, self.refused, self._control_pool, self._control)
        connections = ("grpc.max_allowed_incoming_connections", most_connections())
        options = [*OPTIONS, _HANDSHAKE, connections, message_limit(largest_message)]
        if access.tls is None:  # else only processes of the job have certificates, and a user's own may expire
            options.append(_IDLE)
        self.grpc_server = grpc.server(self._pool, interceptors=[gate], options=options)
        try:
            self.port = self._bind(host, port, access)
        except OSError as error:
            raise UsageError(f"Can't listen on {address_of(host, port)}: {error}.") from error
        except RuntimeError as error:
            raise UsageError(
                f"Can't listen on {host}:{port}: another process holds the port, or {host} is not an address of this "
                "machine. Choose another port, or 0 for any that is free."
            ) from error
        self.address = address_of(host, self.port)
        self._host, self._tls = "" if is_folder(host) else host, access.tls
        self._frame_services: list[FrameService] = []

    def _bind(self, host: str, port: int, access: Access) -> int:
        in_folder = is_folder(host)
        if in_folder:
            port = free_port(host, port)
        where = address_of(host, port)
        if access.tls is None:
            bound: int = self.grpc_server.add_insecure_port(where)
        else:
            bound = self.grpc_server.add_secure_port(where, _credentials(access.tls))
        return port if in_folder else bound

    def add(self, service: FrameService) -> None:
        """Serves it between `start` and `stop`."""
        service.refused = self.refused
        service.listen_at(self._host, self._tls)
        self._control.update(service.control)
        self.grpc_server.add_generic_rpc_handlers((service,))
        self._frame_services.append(service)

    def start(self) -> None:
        self.grpc_server.start()

    def stop(self, grace_seconds: float = 1.0) -> None:
        """Cancels running calls after `grace_seconds`, then returns."""
        stopped = self.grpc_server.stop(grace_seconds)
        for service in self._frame_services:
            service.stop(grace_seconds)
        stopped.wait(grace_seconds + 5.0)
        for pool in (self._pool, self._control_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def _credentials(own: TLS) -> grpc.ServerCredentials:
    """Credentials of a server that presents its current certificate to clients, and requires one from them."""
    shown = own.certificate

    def renewed() -> Any:
        nonlocal shown
        before, shown = shown, own.certificate
        return None if shown is before else _configuration(shown)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown), renewed, require_client_authentication=True)


def _configuration(certificate: Certificate) -> Any:
    own = [(certificate.key, certificate.cert)]
    return grpc.ssl_server_certificate_configuration(own, root_certificates=certificate.ca)


def message_service(methods: Mapping[str, Method], servicer: Any) -> grpc.GenericRpcHandler:
    """A gRPC service of calls with plain protobuf messages.

    Args:
        servicer: has a function for each method, from the request and gRPC's context to the response. Its
            `ElasticCBError`s are raised at the caller.
    """
    handlers = {name: _handler(method, getattr(servicer, name)) for name, method in methods.items()}
    return grpc.method_handlers_generic_handler(next(iter(methods.values())).service, handlers)


def _handler(method: Method, function: Any) -> Any:
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return function(request, context)
        except ElasticCBError as error:
            abort(context, call_error_of(error))

    return grpc.unary_unary_rpc_method_handler(answer, method.request.FromString, method.response.SerializeToString)


_HEALTH_OPTIONS = [
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
    """Answers `Check`: whether a service is ready, and that the whole process (service "") answers; nothing else.

    The job's ports stay closed to callers without the token.

    Raises `UsageError` when the port is taken.
    """

    def __init__(self, host: str, port: int, service: str, ready: Callable[[], bool]) -> None:
        # In this server, a partially received request occupies no thread, unlike in gRPC's other server.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="health", daemon=True)
        self._thread.start()
        try:
            self._server, bound = self._run(_started(f"{host}:{port}", _health_handler(service, ready)))
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


async def _started(address: str, handler: grpc.GenericRpcHandler) -> tuple[Any, int]:
    """A server, and the port on which it listens."""
    server = grpc.aio.server(options=_HEALTH_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    bound = server.add_insecure_port(address)
    await server.start()
    return server, bound


def _health_handler(service: str, ready: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """Handles only `Check`. It parses messages itself, because gRPC logs a traceback for each unreadable message and
    for each unimplemented method, and anybody can make such calls."""

    async def check(message: bytes, context: Any) -> bytes:
        try:
            asked = health_pb2.HealthCheckRequest.FromString(message).service
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message can't be read")
        if asked not in ("", service):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
            raise AssertionError("abort raises")
        states = health_pb2.HealthCheckResponse
        answer: bytes = states(
            status=states.SERVING if not asked or ready() else states.NOT_SERVING
        ).SerializeToString()
        return answer

    handlers = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)
