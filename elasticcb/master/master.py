"""The one process that owns the tasks, the evaluation rounds and the job's state.

Its workers and servers do one job after another: a command has one, `elasticcb.Cluster` as many as it is asked.

gRPC threads feed the state of the present job under one lock (`desk.py`). Everything slow (Keras, parameter servers,
files, callbacks) happens in the thread that drives the job (`job.py`), which wakes up when the queue reaches something.
"""

from __future__ import annotations

import logging
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
from elasticcb.rpc.message_service import MessageService
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import MASTER_METHODS, MASTER_SERVICE
from elasticcb.security.credentials import OPEN, Access, is_loopback
from elasticcb.security.socket_folder import is_folder
from elasticcb.settings import MOST_WORKERS, ClusterSettings

logger = logging.getLogger(__name__)

_LARGEST_MESSAGE = 2**31 - 1  # bytes; protobuf takes no more


class Master:
    """What lasts over jobs: the ports at which it answers, and the desk with the state of the present job.

    Args:
        cluster: how many processes, and where to listen.
        backend: starts and watches the processes.
        say: shows a line to the user.
        access: by which it and its processes know each other.

    Attributes:
        desk: of the present job.
        calls: what processes ask.
        server_scaling: takes wishes for another number of servers.
        watchdog: misses processes that are silent.
    """

    def __init__(
        self, cluster: ClusterSettings, backend: ClusterBackend, say: Callable[[str], None], access: Access = OPEN
    ) -> None:
        # Each worker may have a long poll under way and two more calls; so may each server.
        threads = 8 + 4 * (max(cluster.num_workers, MOST_WORKERS) + cluster.num_ps)  # those that are needed start
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
        self._server.grpc_server.add_generic_rpc_handlers((MessageService(MASTER_METHODS, servicer),))
        if is_folder(host):
            host = "127.0.0.1"  # where others look for metrics and health
        self._metrics: MetricsServer | None = None
        if cluster.metrics_port is not None:
            self._metrics = MetricsServer(self.observe, lambda: self.desk.ready, host, cluster.metrics_port)
            exposed = "" if is_loopback(host) else ", to everybody on that network"
            say(f"Metrics are served at http://{self._metrics.address}/metrics{exposed}.")
        self._health: HealthServer | None = None
        if cluster.health_port is not None:
            self._health = HealthServer(host, cluster.health_port, MASTER_SERVICE, lambda: self.desk.ready)
            say(f"Health checks are answered at {self._health.address}.")

    @property
    def address(self) -> str:
        return self._server.address

    def add(self, service: FrameService) -> None:
        """Serves it at the same port, from `start` on."""
        self._server.add(service)

    @property
    def metrics_address(self) -> str:
        """Where it serves its metrics; "" if it does not."""
        return "" if self._metrics is None else self._metrics.address

    @property
    def health_address(self) -> str:
        """Where it answers health checks; "" if it does not."""
        return "" if self._health is None else self._health.address

    def refused_calls(self) -> dict[str, int]:
        """How many calls it has refused, by reason in words."""
        return self._server.refused.counts()

    def observe(self) -> JobSnapshot:
        """The present job as it is now."""
        with self.desk.state() as state:
            settings, seen = state.settings, observe(state, self.refused_calls(), time.monotonic())
        expires = self.desk.access.certificate_expires()
        return replace(seen, free_disk_bytes=free_disk_bytes(settings), certificate_expires=expires)

    def past_after(self, number: int) -> dict[str, Any]:
        """What has happened in the present job, as `Past.after` gives it."""
        with self.desk.state() as state:
            return state.past.after(number)

    def start(self) -> None:
        """Answers calls from now on."""
        self._server.start()
        if self.desk.backend.separate:  # a thread may stand at a breakpoint
            self.watchdog.start()

    def shut_down(self, grace_seconds: float) -> None:
        """Ends all processes, by and by."""
        try:
            self.desk.close()
            if not self.desk.backend.watches:
                self.desk.wait_until(lambda state: not any(state.roster.up(role) for role in Role), grace_seconds)
            self.desk.backend.stop(grace_seconds)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the server."""
        self.desk.close()
        self.abandon()

    def abandon(self) -> None:
        """Ends the server, and tells nobody that the job is over: another master goes on with it."""
        self.watchdog.stop()
        self._server.stop()
        self.desk.close()  # calls that wait for an answer, which reaches nobody any more, would keep this process
        for server in (self._metrics, self._health):
            if server is not None:
                server.stop()
