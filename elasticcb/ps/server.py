"""A parameter server: the servicer of the present job behind a gRPC port."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from elasticcb.process.stats import TableSize
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.holder import ServerOptions
from elasticcb.ps.servicer import Servicer
from elasticcb.ps.table_limits import TableLimits
from elasticcb.rpc.frame_service import FrameService, Handler
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import OPEN, Access
from elasticcb.settings import RECOVERY_FOLDER, JobSettings, WhenFull
from elasticcb.storage.cold_store import ColdStore

if TYPE_CHECKING:
    from elasticcb.ps.table_update import MakeOptimizers

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 1.0  # for running calls
_MORE_CALLS = 16  # at once, while each worker waits for the others of its round


class PSServer:
    """Serves one part of the model, which the master sends with `Initialize`.

    Raises `UsageError` when the port is taken.
    """

    def __init__(
        self,
        settings: JobSettings,
        make_optimizers: MakeOptimizers | None,
        host: str = "127.0.0.1",
        port: int = 0,
        access: Access = OPEN,
        lost_workers: Collection[int] = (),
    ) -> None:
        self._access = access
        self._lost_workers = lost_workers
        cluster = settings.cluster
        workers = max(cluster.num_workers, cluster.autoscale.most)
        self._server = Server(host, port, workers + _MORE_CALLS, access)
        self._store: ColdStore | None = None
        self._servicer = self._make_servicer(settings, make_optimizers)
        handlers = {PS_METHODS[name]: self._to_present_servicer(name) for name in self._servicer.handlers}
        answer = pb.RefusedCallsResponse
        handlers[PS_METHODS["RefusedCalls"]] = lambda frame: Frame(answer(calls=self.refused_calls()), {})
        self._server.add(FrameService(handlers))

    def refused_calls(self) -> dict[str, int]:
        """Number of refused calls, by reason (text)."""
        return self._server.refused.counts()

    def table_sizes(self) -> dict[str, TableSize]:
        """Sizes of its embedding tables, by variable path."""
        model = self._servicer.holder.model
        return {} if model is None else model.parameters.tables.sizes()

    def _to_present_servicer(self, name: str) -> Handler:
        return lambda frame: self._servicer.handlers[name](frame)

    def begin_job(self, settings: JobSettings, make_optimizers: MakeOptimizers | None) -> None:
        """Drops the previous job's model."""
        self._servicer.holder.close()
        self._close_store()
        self._servicer = self._make_servicer(settings, make_optimizers)

    @property
    def ready(self) -> bool:
        """Whether it holds and serves its part of the current job's model."""
        return self._servicer.holder.ready

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return self._server.address

    def start(self) -> None:
        self._server.start()

    def put_down(self) -> pb.SaveResponse | None:
        """Stops answering calls, and saves what has changed for a replacement; returns `Holder.save_last`."""
        self._server.stop(_GRACE_SECONDS)
        saved = self._servicer.holder.save_last()
        self._close_store()
        return saved

    def stop(self, grace_seconds: float = _GRACE_SECONDS) -> None:
        """Cancels running calls after `grace_seconds`, then returns."""
        self._server.stop(grace_seconds)
        self._servicer.holder.close()
        self._close_store()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _make_servicer(self, settings: JobSettings, make_optimizers: MakeOptimizers | None) -> Servicer:
        table = settings.embedding
        folder = Path(settings.directory, RECOVERY_FOLDER) if settings.directory else None
        if folder is not None and settings.keeps_recovery_files:
            with contextlib.suppress(OSError):  # saving will report it
                folder.mkdir(parents=True, mode=0o700, exist_ok=True)  # may be on this machine only
        if table.when_full is WhenFull.DISK:
            self._store = ColdStore(folder)
        options = ServerOptions(
            training=settings.training,
            make_optimizers=make_optimizers,
            access=self._access,
            limits=TableLimits(table.memory_bytes, table.when_full, self._store, settings.in_program),
            lost_workers=self._lost_workers,
            scratch=folder if settings.keeps_recovery_files else None,
        )
        return Servicer(options)
