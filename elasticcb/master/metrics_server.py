"""Serves the job's metrics to Prometheus by HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticcb.errors import ConnectionLostError

if TYPE_CHECKING:
    from elasticcb.master.master import Master


class MetricsServer:
    """Answers scrapes from now on, in threads of its own.

    Args:
        master: whose present job the metrics are of.
        host: interface to listen on.
        port: 0 takes any free one.

    Attributes:
        address: "host:port".

    Raises `ConnectionLostError` when the port is taken.
    """

    def __init__(self, master: Master, host: str, port: int) -> None:
        # Only now: most jobs serve none.
        from prometheus_client import CollectorRegistry, start_http_server

        from elasticcb.master.prometheus import JobCollector

        registry = CollectorRegistry()
        registry.register(JobCollector(master))
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise ConnectionLostError(
                f"Metrics can't be served on {host}:{port}: {error}. Choose another --metrics_port, or 0 for any that "
                "is free."
            ) from error
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Ends scrapes under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
