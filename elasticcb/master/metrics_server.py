"""Serves the job's metrics to Prometheus by HTTP, and says whether the master lives and is ready."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from elasticcb.errors import ConnectionLostError
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.rpc.services import LIVE_PATH, READY_PATH

_MOST_CONNECTIONS = 32
_QUIET_SECONDS = 5.0  # of a connection between two parts of a request


class _Handler(WSGIRequestHandler):
    timeout = _QUIET_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """The log tells nothing of scrapes."""


class _Server(ThreadingMixIn, WSGIServer):
    """Each connection has a thread; where there are too many, the oldest one is ended, so that a new one is served."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait for a thread; with five, a scrape waits seconds behind a flood

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections: collections.deque[socket.socket] = collections.deque()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        if len(self._connections) > _MOST_CONNECTIONS:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._connections.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The other side has gone, or says nothing."""


class MetricsServer:
    """Answers scrapes from now on, in threads of its own, and the checks at `LIVE_PATH` and `READY_PATH`.

    Args:
        observe: gives the job that the metrics are of.
        ready: whether the servers hold the model, and tasks are handed out; it waits for no lock.
        host: interface to listen on.
        port: 0 takes any free one.

    Attributes:
        address: "host:port".

    Raises `ConnectionLostError` when the port is taken.
    """

    def __init__(self, observe: Callable[[], JobSnapshot], ready: Callable[[], bool], host: str, port: int) -> None:
        # Only now: most jobs serve none.
        from prometheus_client import CollectorRegistry, make_wsgi_app

        from elasticcb.master.prometheus import JobCollector

        registry = CollectorRegistry()
        registry.register(JobCollector(observe))
        try:
            self._server = _Server(host.strip("[]"), port)
        except OSError as error:
            raise ConnectionLostError(
                f"Metrics can't be served on {host}:{port}: {error}. Choose another --metrics_port, or 0 for any that "
                "is free."
            ) from error
        self._metrics = make_wsgi_app(registry)
        self._checks: dict[str, Callable[[], bool]] = {LIVE_PATH: lambda: True, READY_PATH: ready}
        self._server.set_app(self._answer)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        check = self._checks.get(environ["PATH_INFO"])
        if check is None:
            return self._metrics(environ, start_response)
        good = check()
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ok\n" if good else b"not ready\n"]

    def stop(self) -> None:
        """Ends scrapes under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
