"""A parameter server: the servicer behind a gRPC port."""

from __future__ import annotations

from elasticcb import rpc
from elasticcb.ps.optimizer import MakeOptimizer
from elasticcb.ps.peers import SERVICE
from elasticcb.ps.servicer import Servicer
from elasticcb.settings import JobSettings


class PSServer:
    """Serves one part of the model, which the master brings with `Initialize`.

    Args:
        settings: of the job.
        make_optimizer: makes a fresh optimizer at each call; None where nothing is trained.
        host: interface to listen on.
        port: 0 takes any free one.

    Raises `ConnectionLostError` when the port is taken.
    """

    def __init__(
        self,
        settings: JobSettings,
        make_optimizer: MakeOptimizer | None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._servicer = Servicer(settings.training, make_optimizer)
        self._server = rpc.Server(host, port)
        self._server.grpc_server.add_generic_rpc_handlers((rpc.frame_handlers(SERVICE, self._servicer.methods()),))

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return self._server.address

    def start(self) -> None:
        self._server.start()

    def stop(self, grace_seconds: float = 1.0) -> None:
        """Ends calls under way after `grace_seconds`, then returns."""
        self._server.stop(grace_seconds)
        self._servicer.close()
