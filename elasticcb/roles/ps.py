"""The main function of a parameter server."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elasticcb.cluster.role import RoleProcess
from elasticcb.compute.registry import use_backend_of_servers
from elasticcb.errors import ElasticCBError, JobOverError, LeaveRequestedError
from elasticcb.process.signals import end_as_by_sigterm, on_sigterm
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.roles import process
from elasticcb.rpc.server import HealthServer
from elasticcb.rpc.services import PS_SERVICE
from elasticcb.security.socket_folder import host_of
from elasticcb.settings import Command, JobSettings

if TYPE_CHECKING:
    from elasticcb.clients.master import MasterClient
    from elasticcb.ps.server import PSServer

logger = logging.getLogger(__name__)


def run_ps(server: RoleProcess) -> None:
    """Joins a master's cluster as a parameter server, until it is ended.

    Raises `ConnectionLostError` if a port is taken.
    """
    process.begin(server)
    use_backend_of_servers()
    role = _ServerRole(server)
    health = None
    if server.health_port is not None:
        health = HealthServer(server.host, server.health_port, PS_SERVICE, lambda: role.ready)
        logger.info("Health checks are answered at %s", health.address)
    from elasticcb.clients.master import MasterClient

    client = MasterClient(server.master, access=server.access)
    with (
        process.farewell(client, pb.PS, server.index),
        on_sigterm(lambda: role.leave(client)),
        contextlib.ExitStack() as until_end,
    ):
        if health is not None:
            until_end.callback(health.stop)
        until_end.callback(role.stop)
        for settings in client.jobs():
            process.begin_job(settings, server)
            with contextlib.suppress(JobOverError), client.joining():
                role.begin_job(settings, client)
            gc.collect()  # frees the last job's model and optimizers, which are reference cycles


class _ServerRole:
    """The server of this process, from its first job on."""

    def __init__(self, process: RoleProcess) -> None:
        self._index = self._place = process.index
        self._listens_at = host_of(process.master) or process.host, process.port
        self._server: PSServer | None = None

    @property
    def ready(self) -> bool:
        return self._server is not None and self._server.ready

    def begin_job(self, settings: JobSettings, client: MasterClient) -> None:
        trains = settings.command in (Command.TRAIN, Command.CALL)
        make_optimizers = _optimizers_of(settings, client) if trains else None
        if self._server is None:
            self._start(settings, make_optimizers, client)
        else:
            self._server.begin_job(settings, make_optimizers)
        assert self._server is not None
        self._place = client.register(pb.PS, self._index, self._server.address)

    def _start(
        self, settings: JobSettings, make_optimizers: Callable[[int], list[Any]] | None, client: MasterClient
    ) -> None:
        from elasticcb.ps.server import PSServer

        self._server = PSServer(
            settings,
            make_optimizers,
            *self._listens_at,
            access=client.access,
            lost_workers=client.lost_workers,
        )
        client.measures.refused_calls = self._server.refused_calls
        client.measures.tables = self._server.table_sizes
        self._server.start()

    def leave(self, client: MasterClient) -> None:
        """Handles SIGTERM: saves the server's state and ends this process."""
        logger.info("Received SIGTERM: saving the state of this server")
        saved = None if self._server is None else self._server.put_down()
        with contextlib.suppress(ElasticCBError):
            client.leave(pb.PS, self._index, str(LeaveRequestedError()), asked=True, saved=saved)
        end_as_by_sigterm()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


def _optimizers_of(settings: JobSettings, client: MasterClient) -> Callable[[int], list[Any]]:
    """Makes the program's optimizers. It is opened on demand: servers without embedding tables need no Keras."""
    open_spec = functools.cache(lambda: process.open_spec(settings, client))

    def make(count: int) -> list[Any]:
        spec = open_spec()
        assert spec is not None
        # A single optimizer can often be created without the model, which may not fit in a server's memory.
        return [spec.make_optimizer()] if count == 1 else spec.make_optimizers()

    return make
