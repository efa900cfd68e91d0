"""The one process that owns the tasks, the evaluation passes and the job's state.

Its workers and servers run one job after another: a command runs one, `elasticcb.Cluster` as many as requested.

gRPC threads update the state of the current job under one lock (`desk.py`). Everything slow (Keras, parameter servers,
files, callbacks) runs in the thread that drives the job (`job.py`), which wakes up when the queue reaches a milestone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elasticcb.cluster.base import ClusterBackend
from elasticcb.master.calls import Calls
from elasticcb.master.desk import Desk
from elasticcb.master.members import Role
from elasticcb.master.metrics_server import MetricsServer
from elasticcb.master.observation import free_disk_bytes, observe
from elasticcb.master.server_scaling import ServerScaling
from elasticcb.master.servicer import MasterServicer
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.watchdog import Watchdog
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.health import HealthServer
from elasticcb.rpc.message_service import message_service
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import MASTER_METHODS, MASTER_SERVICE
from elasticcb.security.credentials import OPEN, Access, is_loopback
from elasticcb.security.socket_folder import is_folder
from elasticcb.settings import MOST_WORKERS, ClusterSettings

_LARGEST_MESSAGE = 2**31 - 1  # bytes; the limit of protobuf


class Master:
    """What outlives a single job: the listening ports, and the desk with the state of the current job."""

    def __init__(
        self, cluster: ClusterSettings, backend: ClusterBackend, say: Callable[[str], None], access: Access = OPEN
    ) -> None:
        # Each worker and each server may have one long poll and two more calls running.
        threads = 8 + 4 * (max(cluster.num_workers, MOST_WORKERS) + cluster.num_ps)  # threads start on demand
        host = cluster.host or backend.host
        self._server = Server(host, cluster.port, threads, access, _LARGEST_MESSAGE)
        self.desk = Desk(cluster, backend, say, self._server.address, access)
        self.calls = Calls(self.desk)
        self.server_scaling = ServerScaling(self.desk)
        self.watchdog = Watchdog(self.desk, cluster.silence_seconds, backend.watches)
        servicer = MasterServicer(
            self.desk,
            self.calls,
            self.server_scaling,
            self.watchdog.doubt,
            self.observe,
            self.past_after,
            cluster.silence_seconds,
        )
        self._server.grpc_server.add_generic_rpc_handlers((message_service(MASTER_METHODS, servicer),))
        if is_folder(host):
            host = "127.0.0.1"  # where metrics and health checks are expected
        self._metrics: MetricsServer | None = None
        if cluster.metrics_port is not None:
            self._metrics = MetricsServer(self.observe, lambda: self.desk.ready, host, cluster.metrics_port)
            exposed = "" if is_loopback(host) else ", open to everyone on that network"
            say(f"Metrics are served at http://{self._metrics.address}/metrics{exposed}.")
        self._health: HealthServer | None = None
        if cluster.health_port is not None:
            self._health = HealthServer(host, cluster.health_port, MASTER_SERVICE, lambda: self.desk.ready)
            say(f"Health checks are answered at {self._health.address}.")

    @property
    def address(self) -> str:
        return self._server.address

    def add(self, service: FrameService) -> None:
        """Adds a service on the same port; takes effect at `start`."""
        self._server.add(service)

    @property
    def metrics_address(self) -> str:
        """Address of its metrics; "" if disabled."""
        return "" if self._metrics is None else self._metrics.address

    @property
    def health_address(self) -> str:
        """Address of its health checks; "" if disabled."""
        return "" if self._health is None else self._health.address

    def refused_calls(self) -> dict[str, int]:
        """Number of refused calls, by reason (text)."""
        return self._server.refused.counts()

    def observe(self) -> JobSnapshot:
        """A snapshot of the current job."""
        with self.desk.state() as state:
            settings, seen = state.settings, observe(state, self.refused_calls(), time.monotonic())
        expires = self.desk.access.certificate_expires()
        return replace(seen, free_disk_bytes=free_disk_bytes(settings), certificate_expires=expires)

    def past_after(self, number: int) -> dict[str, Any]:
        """Events of the current job, as in `Past.after`."""
        with self.desk.state() as state:
            return state.past.after(number)

    def start(self) -> None:
        """Starts answering calls."""
        self._server.start()
        if self.desk.backend.separate:  # else a thread may be at a breakpoint
            self.watchdog.start()

    def shut_down(self, grace_seconds: float) -> None:
        """Ends all processes gracefully."""
        try:
            self.desk.close()
            if not self.desk.backend.watches:
                self.desk.wait_until(lambda state: not any(state.roster.up(role) for role in Role), grace_seconds)
            self.desk.backend.stop(grace_seconds)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stops the gRPC server."""
        self.desk.close()
        self.abandon()

    def abandon(self) -> None:
        """Stops the gRPC server without announcing the end of the job: another master takes over."""
        self.watchdog.stop()
        self._server.stop()
        self.desk.close()  # otherwise pending calls, whose answers no longer matter, would keep this process alive
        for server in (self._metrics, self._health):
            if server is not None:
                server.stop()
