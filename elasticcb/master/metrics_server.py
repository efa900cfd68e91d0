"""Serves the job's metrics to Prometheus by HTTP, and says whether the master lives and is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from elasticcb.errors import ConnectionLostError
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.rpc.services import LIVE_PATH, READY_PATH


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
        from prometheus_client import CollectorRegistry, start_http_server

        from elasticcb.master.prometheus import JobCollector

        registry = CollectorRegistry()
        registry.register(JobCollector(observe))
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise ConnectionLostError(
                f"Metrics can't be served on {host}:{port}: {error}. Choose another --metrics_port, or 0 for any that "
                "is free."
            ) from error
        self._metrics = self._server.get_app()
        self._checks: dict[str, Callable[[], bool]] = {LIVE_PATH: lambda: True, READY_PATH: ready}
        self._server.set_app(self._answer)
        self.address = f"{host}:{self._server.server_port}"

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        check = self._checks.get(environ["PATH_INFO"])
        if check is None:
            return self._metrics(environ, start_response)  # type: ignore[misc]
        good = check()
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ok\n" if good else b"not ready\n"]

    def stop(self) -> None:
        """Ends scrapes under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
