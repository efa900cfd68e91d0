"""What each process of a job runs."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.cluster.base import ClusterBackend
from elasticcb.cluster.external import ExternalCluster
from elasticcb.cluster.inprocess import InProcessCluster
from elasticcb.cluster.local import LocalCluster, follow_parent, visible_gpus
from elasticcb.errors import (
    DataError,
    ElasticCBError,
    JobOverError,
    LeaveRequestedError,
    ModelFileError,
    UsageError,
    describe,
    user_traceback,
)
from elasticcb.logs import native_messages_to, setup_logging
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import token_of_environment
from elasticcb.running_job import RunningMaster, published
from elasticcb.settings import JOB_FILE, JOURNAL_FILE, RECOVERY_FOLDER, ClusterKind, Command, JobSettings
from elasticcb.sigterm import on_sigterm

if TYPE_CHECKING:
    from elasticcb.master.journal import Journal
    from elasticcb.status import Summary

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0  # for processes that were told to end


def run_master(settings: JobSettings, display: Any, resumed: bool = False) -> Summary:
    """Runs a whole job: its master in this process, the others where the cluster backend puts them.

    Args:
        settings: of the job; its directory exists.
        display: `update(JobStatus)`, `message(text)`, `finish(Summary)`.
        resumed: go on with what an earlier master has begun in this folder.

    Raises:
        JobInterrupted: SIGINT or SIGTERM came.
        ElasticCBError: the job failed.
    """
    with running_cluster(settings, display, _journal(settings, resumed)) as run:
        summary = run(settings)
    display.finish(summary)
    return summary


@contextlib.contextmanager
def running_cluster(
    settings: JobSettings, display: Any, journal: Callable[[], Journal] | None = None
) -> Iterator[Callable[[JobSettings], Summary]]:
    """A master in this process and the processes of its cluster, which do one job after another.

    Gives a function that runs a job; after one that failed, the cluster is of no more use.

    Args:
        settings: of the first job; all must have the same `cluster` and `directory`.
        display: `update(JobStatus)`, `message(text)`.
        journal: opens that of the one job, if it can be resumed.
    """
    logs = Path(settings.directory, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    setup_logging("master", settings.log_level, str(logs / "master.log"))
    _quiet_tensorflow(settings.log_level)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    logger.info("Started: %s", settings)
    with native_messages_to(str(logs / "master.log")):
        backend = make_backend(settings.cluster.kind, settings.directory, settings.log_level, display.message)
        if settings.cluster.kind is ClusterKind.LOCAL and visible_gpus():
            # They are the workers'; the backend has noted them.
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        backend.prepare()
        try:
            from elasticcb.master.job import Job
            from elasticcb.master.master import Master

            master = Master(settings.cluster, backend, display.message, backend.token)
        except BaseException:
            backend.stop(0.0)
            raise
        master.start()
        done = False

        def run(settings: JobSettings) -> Summary:
            job = Job(settings, master, display, journal=journal() if journal else None)
            try:
                return job.run()
            finally:
                job.close()

        try:
            with published(Path(settings.directory), RunningMaster(master.address, backend.token)):
                yield run
            done = True
        except ElasticCBError as error:
            logger.error("%s\n%s", error, error.user_traceback, exc_info=error)
            raise
        finally:
            master.shut_down(STOP_SECONDS)
            if done:
                shutil.rmtree(Path(settings.directory, RECOVERY_FOLDER), ignore_errors=True)


def _journal(settings: JobSettings, resumed: bool) -> Callable[[], Journal] | None:
    """Opens the journal of a job that can be resumed."""
    if settings.command is not Command.TRAIN or not settings.checkpoint.interval_seconds:
        return None
    folder = Path(settings.directory)

    def open_journal() -> Journal:
        from elasticcb.master.journal import Journal

        if not resumed:
            (folder / JOURNAL_FILE).unlink(missing_ok=True)
        if not (resumed and (folder / JOB_FILE).exists()):
            (folder / JOB_FILE).write_text(settings.to_json(), encoding="utf-8")
        journal = Journal(folder / JOURNAL_FILE)
        if journal.memory.over:
            journal.close()
            raise UsageError(f"The job in {folder} is done; there is nothing to go on with.")
        return journal

    return open_journal


def run_worker(master_address: str, index: int = -1, parent_pid: int | None = None, token: str | None = None) -> None:
    """Joins the cluster of the master at `master_address` as a worker, and works until it has no job any more.

    Args:
        token: of the cluster; None takes that of the environment.
    """
    _begin("worker", index, parent_pid)
    from elasticcb.master_client import MasterClient
    from elasticcb.program import open_spec
    from elasticcb.worker.functions import FunctionWorker
    from elasticcb.worker.worker import Worker

    logger.info("TensorFlow is imported")
    client = MasterClient(master_address, token=token_of_environment() if token is None else token)
    with _Farewell(client, pb.WORKER, index):
        for settings in client.jobs():
            _begin_job("worker", settings)
            kind: Any = FunctionWorker if settings.command is Command.CALL else Worker
            with contextlib.suppress(JobOverError):
                kind(settings, client, index, open_spec(settings, client)).run()
            gc.collect()  # models are cycles, which would hold memory through the jobs that follow


def run_ps(
    master_address: str,
    index: int = -1,
    host: str = "127.0.0.1",
    parent_pid: int | None = None,
    token: str | None = None,
) -> None:
    """Joins the cluster of the master at `master_address` as a parameter server, until it is ended."""
    _begin("ps", index, parent_pid)
    from elasticcb.master_client import MasterClient
    from elasticcb.program import open_spec
    from elasticcb.ps.server import PSServer

    logger.info("TensorFlow is imported")
    client = MasterClient(master_address, token=token_of_environment() if token is None else token)
    server: PSServer | None = None

    def leave() -> None:
        logger.info("SIGTERM: what this server holds is written down")
        if server is not None:
            server.put_down()
        with contextlib.suppress(ElasticCBError):
            client.leave(pb.PS, index, str(LeaveRequestedError()), asked=True)
        os.kill(os.getpid(), signal.SIGTERM)

    with _Farewell(client, pb.PS, index), on_sigterm(leave):
        try:
            for settings in client.jobs():
                _begin_job("ps", settings)
                with contextlib.suppress(JobOverError):
                    trains = settings.command in (Command.TRAIN, Command.CALL)
                    spec = open_spec(settings, client) if trains else None
                    make_optimizers = None if spec is None else _optimizers_of(spec)
                    if server is None:
                        server = PSServer(settings, make_optimizers, host, token=client.token)
                        server.start()
                    else:
                        server.begin_job(settings, make_optimizers)
                    client.register(pb.PS, index, server.address)
                gc.collect()  # of the last job's model and optimizers, which are cycles
        finally:
            if server is not None:
                server.stop()


def _optimizers_of(spec: Any) -> Callable[[int], list[Any]]:
    # One optimizer can often be made without a model, which a server may have no room for.
    return lambda count: [spec.make_optimizer()] if count == 1 else spec.make_optimizers()


def _begin(role: str, index: int, parent_pid: int | None) -> None:
    """What a process does before it imports TensorFlow."""
    if parent_pid is not None:
        follow_parent(parent_pid)
    if threading.current_thread() is threading.main_thread():
        setup_logging(f"{role}-{index}" if index >= 0 else role, "INFO")
        _quiet_tensorflow("INFO")
    logger.info("Started")


def _begin_job(role: str, settings: JobSettings) -> None:
    _limit_threads(role, settings)
    if threading.current_thread() is threading.main_thread():  # a thread's logs are those of the caller
        logging.getLogger("elasticcb").setLevel(settings.log_level)
    logger.info("Job %s: %s", settings.name, settings.command.value)


def _limit_threads(role: str, settings: JobSettings) -> None:
    """Lets the processes of one machine share its cores; the user's TF_NUM_INTRAOP_THREADS goes before.

    TensorFlow would start as many threads per process as there are cores, which then wait for each other.
    Servers rest while workers compute, so that workers divide the cores among themselves.
    """
    own_process = threading.current_thread() is threading.main_thread()
    if settings.cluster.kind is ClusterKind.LOCAL and own_process:
        sharing = settings.cluster.num_workers + (settings.cluster.num_ps if role == "ps" else 0)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, cores // max(1, sharing))
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))  # read when TensorFlow first computes


class _Farewell:
    """Tells the master how a process ended, when it ended by itself."""

    def __init__(self, client: Any, role: pb.Role, index: int) -> None:
        self._client = client
        self._place = role, index

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._leave(error)
        self._client.close()
        return isinstance(error, LeaveRequestedError)

    def _leave(self, error: BaseException | None) -> None:
        text = trace = ""
        asked = isinstance(error, LeaveRequestedError)
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted where it runs"
        elif asked:
            text = str(error)
        elif error is not None:
            known = isinstance(error, ElasticCBError)
            text = str(error) if known else describe(error)
            trace = getattr(error, "user_traceback", "") if known else user_traceback(error)
            logger.error("%s", text, exc_info=error)
        try:
            fatal = isinstance(error, (ModelFileError, DataError))
            self._client.leave(*self._place, text, trace, fatal, asked)
        except ElasticCBError:
            logger.debug("The master is gone already")


def make_backend(
    kind: ClusterKind, directory: str, log_level: str, say: Callable[[str], None], needs_token: bool = False
) -> ClusterBackend:
    """Where the processes of a cluster run; its token is that of the environment, or a new one.

    Args:
        directory: logs go to `logs` below it.
        say: shows a line to the user.
        needs_token: also for processes that are started by hand, since they are sent pickles.
    """
    if kind is ClusterKind.EXTERNAL:
        backend: ClusterBackend = ExternalCluster(say)
    elif kind is ClusterKind.INPROCESS:
        backend = InProcessCluster(
            {
                "worker": lambda address, index, token: run_worker(address, index, token=token),
                "ps": lambda address, index, token: run_ps(address, index, token=token),
            }
        )
    else:
        backend = LocalCluster(directory, log_level)
    # People who start processes by hand choose a token, unless what is sent must not go without one.
    optional = kind is ClusterKind.EXTERNAL and not needs_token
    backend.token = token_of_environment() or ("" if optional else secrets.token_hex(16))
    return backend


def _quiet_tensorflow(log_level: str) -> None:
    if log_level != "DEBUG":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
