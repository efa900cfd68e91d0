"""A parameter server: the servicer of the present job behind a gRPC port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticcb import rpc
from elasticcb.ps.optimizer_set import MakeOptimizers
from elasticcb.ps.peers import SERVICE
from elasticcb.ps.servicer import Servicer
from elasticcb.ps.table_limits import TableLimits
from elasticcb.settings import RECOVERY_FOLDER, JobSettings
from elasticcb.tensors import Frame


class PSServer:
    """Serves one part of the model, which the master brings with `Initialize`.

    Args:
        settings: of the first job.
        make_optimizers: makes fresh optimizers, as many as asked for; None where nothing is trained.
        host: interface to listen on.
        port: 0 takes any free one.
        token: of the job; calls without it are refused.

    Raises `ConnectionLostError` when the port is taken.
    """

    def __init__(
        self,
        settings: JobSettings,
        make_optimizers: MakeOptimizers | None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
    ) -> None:
        self._token = token
        self._server = rpc.Server(host, port, token=token)
        self._servicer = _servicer(settings, make_optimizers, token)
        methods = {
            name: (header_type, self._to_present_servicer(name))
            for name, (header_type, _) in self._servicer.methods().items()
        }
        self._server.add(rpc.FrameService(SERVICE, methods, transient={"Exchange"}))

    def _to_present_servicer(self, name: str) -> Callable[[Frame[Any]], Frame[Any]]:
        return lambda frame: self._servicer.methods()[name][1](frame)

    def begin_job(self, settings: JobSettings, make_optimizers: MakeOptimizers | None) -> None:
        """Forgets the last job's model."""
        self._servicer.close()
        self._servicer = _servicer(settings, make_optimizers, self._token)

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return self._server.address

    def start(self) -> None:
        self._server.start()

    def put_down(self, grace_seconds: float = 1.0) -> None:
        """Answers no further call, and writes what the next server in this place will begin with."""
        self._server.stop(grace_seconds)
        self._servicer.write_down()

    def stop(self, grace_seconds: float = 1.0) -> None:
        """Ends calls under way after `grace_seconds`, then returns."""
        self._server.stop(grace_seconds)
        self._servicer.close()


def _servicer(settings: JobSettings, make_optimizers: MakeOptimizers | None, token: str) -> Servicer:
    given = settings.embedding
    limits = TableLimits(given.memory_bytes, given.when_full.value, given.min_count, given.max_age)
    interval = settings.checkpoint.interval_seconds
    keeps_files = make_optimizers is not None and bool(interval and settings.directory)
    recovery = (Path(settings.directory, RECOVERY_FOLDER), interval) if keeps_files else None
    return Servicer(settings.training, make_optimizers, token, limits, recovery)
