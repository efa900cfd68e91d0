"""What each process of a job runs."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.clients.running_master import RunningMaster, published, running_master
from elasticcb.cluster.base import ClusterBackend
from elasticcb.cluster.external import ExternalCluster
from elasticcb.cluster.inprocess import InProcessCluster
from elasticcb.cluster.local import LocalCluster, follow_parent, visible_gpus
from elasticcb.cluster.ray import RayCluster
from elasticcb.errors import (
    CallbackError,
    ConnectionLostError,
    DataError,
    ElasticCBError,
    JobDoneError,
    JobFailedError,
    JobOverError,
    LastCheckpointError,
    LeaveRequestedError,
    ModelFileError,
    UsageError,
    describe,
    user_traceback,
)
from elasticcb.process.limits import allow_many_files
from elasticcb.process.logs import native_messages_to, setup_logging
from elasticcb.process.signals import end_as_by_sigterm, on_sigterm
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.health import HealthServer
from elasticcb.rpc.health_names import PS_SERVICE
from elasticcb.security.certificates import make_certificates
from elasticcb.security.credentials import Access, token_of_environment
from elasticcb.security.tls import TLS, tls_files
from elasticcb.settings import (
    JOB_FILE,
    JOURNAL_FILE,
    RECOVERY_FOLDER,
    STATUS_FILE,
    ClusterKind,
    ClusterSettings,
    Command,
    JobSettings,
)

if TYPE_CHECKING:
    from elasticcb.clients.master import MasterClient
    from elasticcb.cluster.fork_server import ForkServer
    from elasticcb.master.journal import Journal
    from elasticcb.master.master import Master
    from elasticcb.model.spec import Spec
    from elasticcb.ps.server import PSServer
    from elasticcb.status import Summary

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0  # for processes that were told to end


def run_master(
    settings: JobSettings,
    display: Any,
    resumed: bool = False,
    fork_server: ForkServer | None = None,
    since: float = 0.0,
) -> Summary:
    """Runs a whole job: its master in this process, the others where the cluster backend puts them.

    Args:
        settings: of the job; its directory exists.
        display: `update(JobStatus)`, `message(text)`, `finish(Summary)`.
        resumed: go on with what an earlier master has begun in this folder.
        fork_server: has forked this process, and forks the others.
        since: when an earlier master was killed, if its processes may live; seconds of `time.monotonic`.

    Raises:
        JobInterrupted: SIGINT or SIGTERM came.
        LastCheckpointError: all is done but the last checkpoint; the display has the summary.
        ElasticCBError: the job failed.
    """
    try:
        with running_cluster(settings, display, _journal(settings, resumed), fork_server, since) as run:
            summary = run(settings)
    except LastCheckpointError as error:
        display.finish(error.summary)
        raise
    display.finish(summary)
    return summary


@contextlib.contextmanager
def running_cluster(
    settings: JobSettings,
    display: Any,
    journal: Callable[[], Journal] | None = None,
    fork_server: ForkServer | None = None,
    since: float = 0.0,
) -> Iterator[Callable[[JobSettings], Summary]]:
    """A master in this process and the processes of its cluster, which do one job after another.

    Gives a function that runs a job; after one that failed, the cluster is of no more use.

    Args:
        settings: of the first job; all must have the same `cluster` and `directory`.
        display: `update(JobStatus)`, `message(text)`.
        journal: opens that of the one job, if it can be resumed.
        fork_server, since: as in `run_master`; without the first the backend starts one if it needs it.
    """
    logs = Path(settings.directory, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    setup_logging("master", settings.log_level, str(logs / "master.log"))
    _quiet_tensorflow(settings.log_level)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    logger.info("Started: %s", settings)
    with contextlib.ExitStack() as until_end, native_messages_to(str(logs / "master.log")):
        kind = settings.cluster.kind
        backend = make_backend(
            settings.cluster, settings.directory, settings.log_level, display.message, fork_server=fork_server
        )
        if kind is ClusterKind.LOCAL and visible_gpus():
            # They are the workers'; the backend has noted them.
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        if kind is ClusterKind.INPROCESS:
            _limit_threads("master", settings)
        backend.prepare()
        if kind is ClusterKind.RAY and visible_gpus():
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # they are those of the actors
        try:
            from elasticcb.master.job import Job, Takeover

            opened = None if journal is None else journal()
            master, takes_over = _make_master(settings.cluster, settings.directory, backend, opened, display.message)
            takeover = Takeover(backend.taken_over, since) if takes_over else None
            if takeover is None:
                master.start()
        except BaseException:
            backend.stop(0.0)
            raise
        status = Path(settings.directory, STATUS_FILE)
        status.unlink(missing_ok=True)  # of a job before in this folder
        failure: BaseException | None = None

        def run(settings: JobSettings) -> Summary:
            job = Job(settings, master, display, journal=opened, takeover=takeover, goes_on_by=_resumed_by(settings))
            try:
                return job.run()
            finally:
                job.close()

        try:
            running = RunningMaster.of(master.address, backend.access, master.metrics_address, master.health_address)
            with published(Path(settings.directory), running, until_end):
                yield run
        except BaseException as error:
            failure = error
            if isinstance(error, ElasticCBError):
                logger.error("%s\n%s", error, error.user_traceback, exc_info=error)
            raise
        finally:
            try:
                _keep_status(status, master, failure)
            finally:
                master.shut_down(STOP_SECONDS)
            if failure is None:
                shutil.rmtree(Path(settings.directory, RECOVERY_FOLDER), ignore_errors=True)


def _resumed_by(settings: JobSettings) -> str:
    """The command that goes on with a job, where it is not that for a folder; else ""."""
    if settings.cluster.kind is not ClusterKind.KUBERNETES:
        return ""
    from elasticcb.cluster.kubernetes import runs_in_pod

    if not runs_in_pod():
        return ""
    return f"elasticcb resume {settings.name} --namespace={settings.cluster.kubernetes.namespace}"


def _keep_status(path: Path, master: Master, failure: BaseException | None) -> None:
    """Writes down how a job has ended."""
    from elasticcb.master.state_document import document

    try:
        path.write_text(json.dumps(document(master.observe(), failure, over=True), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("How the job ended can't be written down: %s", error)


def _make_master(
    cluster: ClusterSettings,
    directory: str,
    backend: ClusterBackend,
    journal: Journal | None,
    say: Callable[[str], None],
) -> tuple[Master, bool]:
    """A master, and whether it goes on with the processes that another one, which was killed, has left. They are ended
    when that can't be."""
    from elasticcb.master.master import Master

    if backend.taken_over:
        try:
            if journal is None:
                raise JobFailedError("This job keeps no journal.")
            if journal.damaged:
                raise JobFailedError("The journal is damaged.")
            if not journal.memory.servers:
                raise JobFailedError("Training had not begun.")
            where = running_master(directory).at_same_ports(cluster)
            return Master(where, backend, say, backend.access), True
        except ElasticCBError as error:
            say(f"{error} All workers and parameter servers start anew.")
            backend.end_taken_over()
    return Master(cluster, backend, say, backend.access), False


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
            raise JobDoneError(f"The job in {folder} is done; there is nothing to go on with.")
        return journal

    return open_journal


def run_worker(
    master_address: str, index: int = -1, parent_pid: int | None = None, access: Access | None = None
) -> None:
    """Joins the cluster of the master at `master_address` as a worker, and works until it has no job any more.

    Args:
        access: to the cluster; None takes the token of the environment, without TLS.
    """
    _begin("worker", index, parent_pid)
    from elasticcb.clients.master import MasterClient
    from elasticcb.worker.functions import FunctionWorker
    from elasticcb.worker.worker import Worker

    logger.info("TensorFlow is imported")
    client = MasterClient(master_address, access=access or Access(token_of_environment()))
    with _Farewell(client, pb.WORKER, index):
        for settings in client.jobs():
            _begin_job("worker", settings)
            kind: Any = FunctionWorker if settings.command is Command.CALL else Worker
            with contextlib.suppress(JobOverError):
                kind(settings, client, index, _open_spec(settings, client)).run()
            gc.collect()  # models are cycles, which would hold memory through the jobs that follow


def run_ps(
    master_address: str,
    index: int = -1,
    host: str = "127.0.0.1",
    parent_pid: int | None = None,
    access: Access | None = None,
    health_port: int | None = None,
    port: int = 0,
) -> None:
    """Joins the cluster of the master at `master_address` as a parameter server, until it is ended.

    Args:
        access: as for `run_worker`.
        health_port: where it answers health checks, from now on; 0: any free port, None: it does not.
        port: where it listens; 0: any free one.

    Raises `ConnectionLostError` when a port is taken.
    """
    _begin("ps", index, parent_pid)
    server: PSServer | None = None
    health: HealthServer | None = None
    if health_port is not None:
        health = HealthServer(host, health_port, PS_SERVICE, lambda: server is not None and server.ready)
        logger.info("Health checks are answered at %s", health.address)
    from elasticcb.clients.master import MasterClient
    from elasticcb.ps.server import PSServer

    logger.info("TensorFlow is imported")
    client = MasterClient(master_address, access=access or Access(token_of_environment()))
    place = index

    def warn(text: str) -> None:
        client.warn(f"parameter server {place} can't write", f"Parameter server {place}: {text}")

    def leave() -> None:
        logger.info("SIGTERM: what this server holds is written down")
        if server is not None:
            server.put_down()
        with contextlib.suppress(ElasticCBError):
            client.leave(pb.PS, index, str(LeaveRequestedError()), asked=True)
        end_as_by_sigterm()

    with _Farewell(client, pb.PS, index), on_sigterm(leave):
        try:
            for settings in client.jobs():
                _begin_job("ps", settings)
                with contextlib.suppress(JobOverError):
                    trains = settings.command in (Command.TRAIN, Command.CALL)
                    spec = _open_spec(settings, client) if trains else None
                    make_optimizers = None if spec is None else _optimizers_of(spec)
                    if server is None:
                        server = PSServer(
                            settings,
                            make_optimizers,
                            host,
                            port,
                            access=client.access,
                            warn=warn,
                            lost_workers=client.lost_workers,
                        )
                        client.measures.refused_calls = server.refused_calls
                        server.start()
                    else:
                        server.begin_job(settings, make_optimizers)
                    place = client.register(pb.PS, index, server.address)
                gc.collect()  # of the last job's model and optimizers, which are cycles
        finally:
            for each in (server, health):
                if each is not None:
                    each.stop()


def _open_spec(settings: JobSettings, client: MasterClient) -> Spec | None:
    """What the present job of a worker or a server runs; None for functions without a model."""
    from elasticcb.model.model_file import ModelSpec
    from elasticcb.model.program import ProgramSpec

    if settings.model.definition:
        return ModelSpec(settings.model)
    program = client.program()
    return ProgramSpec(program) if program else None


def _optimizers_of(spec: Any) -> Callable[[int], list[Any]]:
    # One optimizer can often be made without a model, which a server may have no room for.
    return lambda count: [spec.make_optimizer()] if count == 1 else spec.make_optimizers()


def _begin(role: str, index: int, parent_pid: int | None) -> None:
    """What a process does before it imports TensorFlow."""
    if parent_pid is not None:
        follow_parent(parent_pid)
        allow_many_files()
    if threading.current_thread() is threading.main_thread():
        setup_logging(f"{role}-{index}" if index >= 0 else role, "INFO")
        _quiet_tensorflow("INFO")
    logger.info("Started")


def _begin_job(role: str, settings: JobSettings) -> None:
    if threading.current_thread() is threading.main_thread():  # a thread's logs, and cores, are those of the caller
        _limit_threads(role, settings)
        logging.getLogger("elasticcb").setLevel(settings.log_level)
    logger.info("Job %s: %s", settings.name, settings.command.value)


def _limit_threads(role: str, settings: JobSettings) -> None:
    """Lets TensorFlow compute with as many threads as this process may use cores, or with its share of them on a
    machine whose processes are the job's. The user's TF_NUM_INTRAOP_THREADS goes before.

    TensorFlow itself would start a thread for each core of the machine, which then wait for each other: it does not
    know what a container, or a cgroup, may use. Servers rest while workers compute, so that workers divide the cores
    among themselves.
    """
    from loky import cpu_count

    sharing = 1
    if settings.cluster.kind is ClusterKind.LOCAL:
        sharing = max(1, settings.cluster.num_workers + (settings.cluster.num_ps if role == "ps" else 0))
    threads = max(1, cpu_count() // sharing)
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
            # Where the call was made says nothing about why nobody answers it.
            logger.error("%s", text, exc_info=None if isinstance(error, ConnectionLostError) else error)
        try:
            fatal = isinstance(error, (ModelFileError, DataError, CallbackError))
            self._client.leave(*self._place, text, trace, fatal, asked)
        except ElasticCBError:
            logger.debug("The master is gone already")


def make_backend(
    cluster: ClusterSettings,
    directory: str,
    log_level: str,
    say: Callable[[str], None],
    needs_token: bool = False,
    fork_server: ForkServer | None = None,
) -> ClusterBackend:
    """Where the processes of a cluster run; its token is that of the environment, or a new one, and so is its CA.

    Args:
        directory: logs go to `logs` below it.
        say: shows a line to the user.
        needs_token: also for processes that are started by hand, since they are sent pickles.
        fork_server: has forked this process, and forks those of a local cluster.

    Raises `UsageError` when TLS is asked for, and can't be had.
    """
    kind = cluster.kind
    if kind is ClusterKind.EXTERNAL:
        backend: ClusterBackend = ExternalCluster(say, directory)
    elif kind is ClusterKind.INPROCESS:
        backend = InProcessCluster(
            {
                "worker": lambda address, index, access: run_worker(address, index, access=access),
                "ps": lambda address, index, access: run_ps(address, index, access=access),
            }
        )
    elif kind is ClusterKind.KUBERNETES:
        from elasticcb.cluster.kubernetes import KubernetesCluster

        backend = KubernetesCluster(cluster.kubernetes, directory, log_level, say)
    elif kind is ClusterKind.RAY:
        backend = RayCluster(directory, log_level, cluster.ray_address, say)
    else:
        backend = LocalCluster(directory, log_level, fork_server)
    if backend.taken_over:
        with contextlib.suppress(UsageError):
            backend.access = running_master(directory).access
            return backend
    # People who start processes by hand choose a token, unless what is sent must not go without one.
    optional = kind is ClusterKind.EXTERNAL and not needs_token
    token = token_of_environment() or ("" if optional else secrets.token_hex(16))
    backend.access = Access(token, _tls(cluster, directory))
    return backend


def _tls(cluster: ClusterSettings, directory: str) -> TLS | None:
    files = tls_files(dataclasses.asdict(cluster))
    if files is None and cluster.tls:
        files = make_certificates(directory)
    return None if files is None else TLS.load(files)


def _quiet_tensorflow(log_level: str) -> None:
    if log_level != "DEBUG":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
