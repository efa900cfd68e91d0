"""What each process of a job runs."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.cluster.base import ClusterBackend
from elasticcb.cluster.external import ExternalCluster
from elasticcb.cluster.inprocess import InProcessCluster
from elasticcb.cluster.local import LocalCluster, follow_parent, visible_gpus
from elasticcb.errors import DataError, ElasticCBError, ModelFileError
from elasticcb.logs import native_messages_to, setup_logging
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import ClusterKind, Command, JobSettings

if TYPE_CHECKING:
    from elasticcb.status import Summary

logger = logging.getLogger(__name__)


def run_master(settings: JobSettings, display: Any) -> Summary:
    """Runs a whole job: its master in this process, the others where the cluster backend puts them.

    Args:
        settings: of the job; its directory exists.
        display: `update(JobStatus)`, `message(text)`, `finish(Summary)`.

    Raises:
        JobInterrupted: SIGINT or SIGTERM came.
        ElasticCBError: the job failed.
    """
    logs = Path(settings.directory, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    setup_logging("master", settings.log_level, str(logs / "master.log"))
    _quiet_tensorflow(settings.log_level)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    logger.info("Started: %s", settings)
    with native_messages_to(str(logs / "master.log")):
        backend = _make_backend(settings, display)
        if settings.cluster.kind is ClusterKind.LOCAL and visible_gpus():
            # They are the workers'; the backend has noted them.
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        from elasticcb.master.job import Job

        try:
            summary = Job(settings, backend, display).run()
        except ElasticCBError as error:
            logger.error("%s\n%s", error, error.user_traceback, exc_info=error)
            raise
    display.finish(summary)
    return summary


def run_worker(master_address: str, index: int = -1, parent_pid: int | None = None) -> None:
    """Joins the job of the master at `master_address` as a worker, and works until it is over."""
    _begin("worker", index, parent_pid)
    from elasticcb.master_client import MasterClient
    from elasticcb.worker.worker import Worker

    client = MasterClient(master_address)
    settings = _settings_of(client)
    with _Farewell(client):
        Worker(settings, client, index).run()


def run_ps(master_address: str, index: int = -1, host: str = "127.0.0.1", parent_pid: int | None = None) -> None:
    """Joins the job of the master at `master_address` as a parameter server, until it is ended."""
    _begin("ps", index, parent_pid)
    from elasticcb.master_client import MasterClient
    from elasticcb.model_spec import ModelSpec
    from elasticcb.ps.server import PSServer

    client = MasterClient(master_address)
    settings = _settings_of(client)
    with _Farewell(client):
        trains = settings.command is Command.TRAIN
        server = PSServer(settings, ModelSpec(settings.model).make_optimizer if trains else None, host)
        server.start()
        client.register(pb.PS, index, server.address)
        try:
            client.stay_until_over()
        finally:
            server.stop()


def _begin(role: str, index: int, parent_pid: int | None) -> None:
    """What a process does before it imports TensorFlow."""
    if parent_pid is not None:
        follow_parent(parent_pid)
    if threading.current_thread() is threading.main_thread():
        setup_logging(f"{role}-{index}" if index >= 0 else role, "INFO")
        _quiet_tensorflow("INFO")
    logger.info("Started")


def _settings_of(client: Any) -> JobSettings:
    # Asked for after the import, which takes the longest: the master is busy with its own meanwhile.
    logger.info("TensorFlow is imported")
    settings: JobSettings = client.settings()
    logging.getLogger("elasticcb").setLevel(settings.log_level)
    return settings


class _Farewell:
    """Tells the master how a process ended, when it ended by itself."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._client.id:  # else the master does not know this process
            self._leave(error)
        self._client.close()

    def _leave(self, error: BaseException | None) -> None:
        text = ""
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted where it runs"
        elif error is not None:
            text = str(error) if isinstance(error, ElasticCBError) else f"{type(error).__name__}: {error}"
            logger.error("%s", text, exc_info=error)
        try:
            fatal = isinstance(error, (ModelFileError, DataError))
            self._client.leave(text, getattr(error, "user_traceback", ""), fatal)
        except ElasticCBError:
            logger.debug("The master is gone already")


def _make_backend(settings: JobSettings, display: Any) -> ClusterBackend:
    kind = settings.cluster.kind
    if kind is ClusterKind.INPROCESS:
        return InProcessCluster({"worker": run_worker, "ps": run_ps})
    if kind is ClusterKind.EXTERNAL:
        return ExternalCluster(display.message)
    return LocalCluster(settings.directory, settings.log_level)


def _quiet_tensorflow(log_level: str) -> None:
    if log_level != "DEBUG":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
