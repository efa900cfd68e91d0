"""The main function of a job's master."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.clients.running_master import RunningMaster, forget_earlier_job, published, running_master
from elasticcb.cluster.base import BackendContext, ClusterBackend
from elasticcb.cluster.registry import make_backend
from elasticcb.compute.registry import chosen_backend
from elasticcb.errors import (
    ElasticCBError,
    JobDoneError,
    JobFailedError,
    LastCheckpointError,
    ReplacedError,
    UsageError,
    describe,
    user_traceback,
)
from elasticcb.process.devices import hide_gpus, limit_threads, visible_gpus
from elasticcb.process.host import POD_NAME
from elasticcb.process.log_files import LogFile, limit_log_files, native_messages_to, setup_logging
from elasticcb.process.signals import interrupt, repeat_ignored_interrupts
from elasticcb.process.system import remove_generated_files
from elasticcb.roles.process import quiet_libraries
from elasticcb.roles.run import run_role
from elasticcb.security.socket_folder import host_of, make_private, remove_folder
from elasticcb.settings import (
    HISTORY_FILE,
    JOB_FILE,
    JOURNAL_FILE,
    RECOVERY_FOLDER,
    STATUS_FILE,
    ClusterSettings,
    Command,
    JobSettings,
)
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import ENDING_SECONDS, FolderLock
from elasticcb.storage.local_folders import abandoned_folders

if TYPE_CHECKING:
    from elasticcb.cluster.local.fork_server import ForkServer
    from elasticcb.master.journal import Journal
    from elasticcb.master.master import Master
    from elasticcb.master.snapshot import JobSnapshot

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0  # seconds for processes that were asked to end
_OLD_MASTER_SECONDS = 60.0  # seconds for another master in this folder that is ending


def run_master(
    settings: JobSettings,
    display: Any,
    resumed: bool = False,
    fork_server: ForkServer | None = None,
    since: float = 0.0,
) -> JobSnapshot:
    """Runs a complete job: its master in this process, the others as the cluster backend places them.

    Args:
        settings: settings of the job; its directory must exist.
        since: time (`time.monotonic`) when an earlier master was killed, if its processes may be alive.

    Raises:
        JobInterrupted: received SIGINT or SIGTERM.
        LastCheckpointError: only the last checkpoint could not be written; the display has the summary.
        ElasticCBError: the job failed.
    """
    settings = replace(settings, keras_backend=chosen_backend())
    try:
        # The folder has no files of this job yet, and its owner may have just started.
        wait_seconds = _OLD_MASTER_SECONDS if resumed or since else ENDING_SECONDS
        with running_cluster(
            settings, display, _journal(settings, resumed, display.message), fork_server, since, wait_seconds
        ) as run:
            try:
                summary = run(settings)
            except SystemExit as error:  # in a hook on the master
                raise JobFailedError(
                    f"The model file ended the master with {describe(error)}. To stop training from a hook, set "
                    "`self.model.stop_training = True`; to fail the job, raise another error.",
                    user_traceback(error),
                ) from error
    except LastCheckpointError as error:
        display.finish(error.summary)
        raise
    display.finish(summary)
    return summary


@contextlib.contextmanager
def running_cluster(
    settings: JobSettings,
    display: Any,
    journal: Callable[[], Journal | None] | None = None,
    fork_server: ForkServer | None = None,
    since: float = 0.0,
    wait_seconds: float = _OLD_MASTER_SECONDS,
    make_host: Callable[[JobSettings], Any] | None = None,
) -> Iterator[Callable[[JobSettings], JobSnapshot]]:
    """Context with a master in this process and the processes of its cluster, which run one job after another.

    Yields a function that runs a job; after a failed job, the cluster can't be used any more.

    Args:
        settings: settings of the first job; all jobs must have the same `cluster` and `directory`.
        journal: opens the journal of the only job; None, and its result None: the job can't be resumed.
        wait_seconds: how long to wait for another master in this folder that is ending.
        make_host: as in `Job`.
    """
    folder = Path(settings.directory)
    with contextlib.ExitStack() as until_end:
        make_private(folder)
        until_end.enter_context(FolderLock(folder, wait_seconds=wait_seconds))
        durable.drop_unfinished(folder)
        until_end.enter_context(native_messages_to(_begin(settings)))
        context = BackendContext(
            settings.cluster, settings.directory, settings.log_level, display.message, run_role, fork_server
        )
        backend = _prepared_backend(context)
        try:
            from elasticcb.master.job import Job, Takeover

            opened = None if journal is None else journal()
            master, takes_over = _make_master(settings.cluster, settings.directory, backend, opened, display.message)
            takeover = Takeover(backend.taken_over, since) if takes_over else None
            if opened is not None and opened.copy is not None:
                until_end.enter_context(opened.copy.kept(master))
            if opened is not None and opened.memory.begun:
                master.server.history_before = _past_before(folder)
            if takeover is None:
                _remove_rows_on_disk(settings)
                master.start()
        except BaseException:
            backend.stop(0.0)
            raise

        def run(settings: JobSettings) -> JobSnapshot:
            goes_on_by = backend.resume_command(settings.name)
            master.server.show_printed = lambda text, is_error: display.message(text)
            job = Job(settings, master, display, make_host, journal=opened, takeover=takeover, goes_on_by=goes_on_by)
            try:
                return job.run()
            finally:
                job.close()

        with _ended(master, settings):
            running = RunningMaster.of(master.address, backend.access, master.metrics_address, master.health_address)
            with published(folder, running):
                yield run


def _begin(settings: JobSettings) -> LogFile:
    """Prepares this process as a master, before other processes are started; returns its log."""
    path = Path(settings.directory, "logs", "master.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    log = LogFile(str(path))
    in_pod = [logging.StreamHandler(sys.stdout)] if POD_NAME in os.environ else []  # whose logs are its output
    setup_logging("master", settings.log_level, log, *in_pod)
    limit_log_files(settings.log_file_bytes, settings.log_files_kept)
    quiet_libraries(settings.log_level)
    atexit.register(remove_generated_files)  # TensorFlow does not remove the files that Python compiled
    if threading.current_thread() is threading.main_thread():
        repeat_ignored_interrupts()
        signal.signal(signal.SIGTERM, interrupt)
        # Not ignored signals, as with `nohup` or `&`.
        for number, by_default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
            if signal.getsignal(number) is by_default:
                signal.signal(number, interrupt)
    logger.info("Started: %s", settings.to_show())
    return log


def _prepared_backend(context: BackendContext) -> ClusterBackend:
    backend = make_backend(context)
    if not backend.taken_over:
        with contextlib.suppress(UsageError):  # left by a master that was killed with all its processes
            remove_folder(host_of(running_master(context.directory).address))
    if not backend.separate:
        limit_threads(os.environ)
    backend.prepare()
    if backend.separate and visible_gpus():  # they are for its processes; the backend has recorded them
        hide_gpus(os.environ)
    return backend


@contextlib.contextmanager
def _ended(master: Master, settings: JobSettings) -> Iterator[None]:
    """Context that records how its body ended, and ends the processes."""
    status = Path(settings.directory, STATUS_FILE)
    status.unlink(missing_ok=True)  # of an earlier job in this folder
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        if isinstance(error, ElasticCBError):
            logger.error("%s\n%s", error, error.user_traceback, exc_info=error)
        raise
    finally:
        if isinstance(failure, ReplacedError):
            master.abandon()  # processes and files belong to another master
        else:
            try:
                keep_status(status.parent, master, failure)
            finally:
                master.shut_down(STOP_SECONDS)
            _remove_rows_on_disk(settings)
        if failure is None:
            shutil.rmtree(Path(settings.directory, RECOVERY_FOLDER), ignore_errors=True)


def _past_before(folder: Path) -> dict[str, Any]:
    """The history of a resumed job, for its dashboard."""
    with contextlib.suppress(OSError, ValueError):
        return durable.read_document(folder / HISTORY_FILE)
    return {}


def _remove_rows_on_disk(settings: JobSettings) -> None:
    """Removes files of killed parameter servers, for example of an interrupted job; none may be starting."""
    for folder in abandoned_folders(Path(settings.directory, RECOVERY_FOLDER), least_age_seconds=0):
        shutil.rmtree(folder, ignore_errors=True)


def keep_status(folder: Path, master: Master, failure: BaseException | None) -> None:
    """Records how a job has ended, for `elasticcb status` and `jobs`."""
    try:
        durable.write_document(folder / STATUS_FILE, master.observe().ended(failure).to_json())
        durable.write_document(folder / HISTORY_FILE, master.past_after(0))
    except OSError as error:
        logger.warning("The final status of the job can't be saved: %s", error)


def _make_master(
    cluster: ClusterSettings,
    directory: str,
    backend: ClusterBackend,
    journal: Journal | None,
    say: Callable[[str], None],
) -> tuple[Master, bool]:
    """Creates a master; returns it, and whether it takes over the processes of a killed master. If it can't, they are
    ended."""
    from elasticcb.master.master import Master

    if backend.taken_over:
        try:
            if journal is None:
                raise JobFailedError("This job has no journal.")
            if journal.copy is not None and journal.copy.was_fetched:
                raise JobFailedError("This machine does not know what the last master did in its last second.")
            if not journal.memory.servers:
                raise JobFailedError("Training had not started.")
            where = running_master(directory).at_same_ports(cluster)
            return Master(where, backend, say, backend.access), True
        except ElasticCBError as error:
            say(f"{error} Restarting all workers and parameter servers.")
            backend.end_taken_over()
    return Master(cluster, backend, say, backend.access), False


def _journal(settings: JobSettings, resumed: bool, say: Callable[[str], None]) -> Callable[[], Journal | None] | None:
    """Opens the journal of a job that can be resumed; of a new training job, also replaces an earlier one's files."""
    if settings.command is not Command.TRAIN:
        return None
    folder = Path(settings.directory)

    def open_journal() -> Journal | None:
        from elasticcb.master.job_copy import JobCopy, refuse_copy
        from elasticcb.master.journal import Journal

        if not settings.store:
            refuse_copy(folder)  # the folder is locked now
        if not resumed:
            forget_earlier_job(folder)
        copy = JobCopy.taken(settings.store, folder, resumed, say) if settings.store else None
        if not (folder / JOB_FILE).exists():
            durable.write_document(folder / JOB_FILE, json.loads(settings.to_json()))
        if not settings.checkpoint.interval_seconds:
            return None
        journal = Journal(folder / JOURNAL_FILE)
        if journal.memory.over:
            journal.close()
            raise JobDoneError(f"The job in {settings.store or folder} is done; there is nothing to continue.")
        journal.copy = copy
        journal.begin()
        return journal

    return open_journal
