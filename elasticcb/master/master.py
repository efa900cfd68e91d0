"""The one process that owns the tasks, the evaluation passes and the job's state.

Its workers and servers run one job after another: a command runs one, `elasticcb.Cluster` as many as requested.

gRPC threads tell the current job's machine what happens, under one lock (`master_server.py`). Everything slow (Keras,
parameter servers, files, callbacks) runs in the thread that drives the job (`job.py`), which wakes up when the queue
reaches a milestone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticcb.cluster.base import ClusterBackend
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.master_server import MasterServer
from elasticcb.master.members import Member, Role
from elasticcb.master.observation import free_disk_bytes, observe
from elasticcb.master.server_scaling import ServerScaling
from elasticcb.master.servicer import MasterServicer
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import HealthServer, Server, message_service
from elasticcb.rpc.services import MASTER_METHODS, MASTER_SERVICE, PS_METHODS
from elasticcb.security.credentials import OPEN, Access, is_loopback
from elasticcb.security.socket_folder import is_folder
from elasticcb.settings import MOST_WORKERS, ClusterSettings

if TYPE_CHECKING:
    from elasticcb.master.prometheus import MetricsServer

_LARGEST_MESSAGE = 2**31 - 1  # bytes; the limit of protobuf
_LONGEST_PAUSE_SECONDS = 1.0  # between two checks of the watchdog
_ANSWER_SECONDS = 5.0  # for a server to answer
_DOUBT_PAUSE_SECONDS = 0.5  # before it is asked again


class Master:
    """What outlives a single job: the listening ports, and the `MasterServer`."""

    def __init__(
        self, cluster: ClusterSettings, backend: ClusterBackend, say: Callable[[str], None], access: Access = OPEN
    ) -> None:
        # Each worker and each server may have one long poll and two more calls running.
        threads = 8 + 4 * (max(cluster.num_workers, MOST_WORKERS) + cluster.num_ps)  # threads start on demand
        host = cluster.host or backend.host
        self._grpc = Server(host, cluster.port, threads, access, _LARGEST_MESSAGE)
        self.server = MasterServer(cluster, backend, say, self._grpc.address, access)
        self.server_scaling = ServerScaling(self.server)
        self.watchdog = Watchdog(self.server, cluster.silence_seconds, backend.watches)
        servicer = MasterServicer(self.server, self.server_scaling, self.watchdog.doubt, self.observe)
        self._grpc.grpc_server.add_generic_rpc_handlers((message_service(MASTER_METHODS, servicer),))
        if is_folder(host):
            host = "127.0.0.1"  # where metrics and health checks are expected
        self._metrics: MetricsServer | None = None
        if cluster.metrics_port is not None:
            from elasticcb.master.prometheus import MetricsServer  # most jobs serve no metrics

            self._metrics = MetricsServer(self.observe, lambda: self.server.ready, host, cluster.metrics_port)
            exposed = "" if is_loopback(host) else ", open to everyone on that network"
            say(f"Metrics are served at http://{self._metrics.address}/metrics{exposed}.")
        self._health: HealthServer | None = None
        if cluster.health_port is not None:
            self._health = HealthServer(host, cluster.health_port, MASTER_SERVICE, lambda: self.server.ready)
            say(f"Health checks are answered at {self._health.address}.")

    @property
    def address(self) -> str:
        return self._grpc.address

    def add(self, service: FrameService) -> None:
        """Adds a service on the same port; takes effect at `start`."""
        self._grpc.add(service)

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
        return self._grpc.refused.counts()

    def observe(self) -> JobSnapshot:
        """A snapshot of the current job."""
        with self.server.state() as state:
            settings, seen = state.settings, observe(state, self.refused_calls(), time.monotonic())
        expires = self.server.access.certificate_expires()
        return replace(seen, free_disk_bytes=free_disk_bytes(settings), certificate_expires=expires)

    def past_after(self, number: int) -> dict[str, Any]:
        """Events of the current job, as in `JobHistory.after`."""
        with self.server.state() as state:
            return state.history.after(number)

    def start(self) -> None:
        """Starts answering calls."""
        self._grpc.start()
        if self.server.backend.separate:  # else a thread may be at a breakpoint
            self.watchdog.start()

    def shut_down(self, grace_seconds: float) -> None:
        """Ends all processes gracefully."""
        try:
            self.server.close()
            if not self.server.backend.watches:
                self.server.wait_until(lambda state: not any(state.roster.up(role) for role in Role), grace_seconds)
            self.server.backend.stop(grace_seconds)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stops the gRPC server."""
        self.server.close()
        self.abandon()

    def abandon(self) -> None:
        """Stops the gRPC server without announcing the end of the job: another master takes over."""
        self.watchdog.stop()
        self._grpc.stop()
        self.server.close()  # otherwise pending calls, whose answers no longer matter, would keep this process alive
        for server in (self._metrics, self._health):
            if server is not None:
                server.stop()


class Watchdog:
    """Kills processes that are silent for too long, and has them replaced.

    It runs in its own thread: the driving thread may itself be waiting for such a process.

    A server, or a worker without an exit monitor, is considered lost after `silence_seconds`. A monitored worker has
    the time of a lease, because user code may block its heartbeat thread.

    Args:
        silence_seconds: timeout for heartbeats, which are sent every third of it.
        watched: whether the backend reports exited processes. Then processes may take long to get ready for the current
            job.
    """

    def __init__(self, master: MasterServer, silence_seconds: float, watched: bool) -> None:
        self._master = master
        self._silence, self._watched = silence_seconds, watched
        self._looked = -math.inf
        self._doubted: set[int] = set()  # ids of servers being probed
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(min(_LONGEST_PAUSE_SECONDS, self._silence / 10)):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Replaces processes that are overdue at `now`, in seconds."""
        since, self._looked = now - self._looked, now
        with self._master.state() as state:
            if since > self._silence / 2:  # this process itself was suspended, and received no heartbeats
                state.roster.forgive(now)
            if state.closing or state.over:
                return
            for role in Role:
                seconds = self._seconds(role, state)
                for member in state.roster.silent(now, seconds):
                    if member.role is role and (not self._watched or state.has(member.id)):
                        self._master.replace(member, f"no heartbeat for {seconds:g} s")

    def _seconds(self, role: Role, state: JobMachine) -> float:
        settings = state.settings
        if role is Role.PS or not self._watched or settings is None:
            return self._silence
        return max(self._silence, settings.cluster.lease_seconds)

    def doubt(self, server: int) -> None:
        """Someone gets no answer from a server. It is replaced unless it answers the master."""
        with self._master.state() as state:
            member = state.roster.member(server)
            if (
                self._thread.is_alive()
                and member is not None
                and member.role is Role.PS
                and server not in self._doubted
            ):
                self._doubted.add(server)
                threading.Thread(target=self._reach, args=(member,), name="doubt", daemon=True).start()

    def _reach(self, member: Member) -> None:
        begun = time.monotonic()
        connection = Connection(member.address, str(member), access=self._master.access)
        answers = False
        while not answers and not self._stopped.is_set() and self._is_up(member):
            answers = connection.is_alive(PS_METHODS["Exchange"], _ANSWER_SECONDS)
            if not answers and time.monotonic() - begun >= self._silence:
                with self._master.state() as state:
                    if self._is_up(member) and not state.closing:
                        self._master.replace(member, f"unreachable for {self._silence:g} s")
                break
            self._stopped.wait(0.0 if answers else _DOUBT_PAUSE_SECONDS)
        connection.close()
        with self._master.state():
            self._doubted.discard(member.id)

    def _is_up(self, member: Member) -> bool:
        with self._master.state() as state:
            return state.roster.member(member.id) is not None
