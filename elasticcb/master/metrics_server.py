"""Serves the job's metrics to Prometheus over HTTP, and liveness and readiness checks."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from elasticcb.errors import UsageError
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.rpc.services import LIVE_PATH, READY_PATH

_MOST_CONNECTIONS = 32
_QUIET_SECONDS = 5.0  # timeout between two parts of a request


class _Handler(WSGIRequestHandler):
    timeout = _QUIET_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    """One thread per connection; at the limit, the oldest connection is closed to serve a new one."""

    daemon_threads = True
    # connections waiting for a thread; with the default 5, a scrape waits for seconds during a flood
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections: collections.deque[socket.socket] = collections.deque()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        if len(self._connections) > _MOST_CONNECTIONS:
            with contextlib.suppress(OSError):  # already closed
                self._connections.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client is gone, or timed out."""


class MetricsServer:
    """Answers scrapes, in its own threads, and the checks at `LIVE_PATH` and `READY_PATH`.

    Raises `UsageError` when the port is taken.
    """

    def __init__(self, observe: Callable[[], JobSnapshot], ready: Callable[[], bool], host: str, port: int) -> None:
        # Imported only now: most jobs serve no metrics.
        from prometheus_client import CollectorRegistry, make_wsgi_app

        from elasticcb.master.prometheus import JobCollector

        registry = CollectorRegistry()
        registry.register(JobCollector(observe))
        try:
            self._server = _Server(host.strip("[]"), port)
        except OSError as error:
            raise UsageError(
                f"Could not serve metrics on {host}:{port}: {error}. Choose another metrics_port, or 0 for any that "
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
        """Ends running scrapes."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
