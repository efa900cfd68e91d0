"""What workers and parameter servers do when they start, when a job starts, and when they end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from elasticcb.cluster.role import RoleProcess
from elasticcb.errors import (
    CallbackError,
    ConnectionLostError,
    DataError,
    ElasticCBError,
    LeaveRequestedError,
    ModelFileError,
    describe,
    user_traceback,
)
from elasticcb.process.devices import hide_gpus, limit_threads
from elasticcb.process.import_path import follow_caller
from elasticcb.process.log_files import limit_log_files, own_log, quiet_environment, setup_logging
from elasticcb.process.system import allow_many_files, follow_parent, show_as
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.security.socket_folder import hold_folder, host_of, remove_folder
from elasticcb.settings import JobSettings

if TYPE_CHECKING:
    from elasticcb.clients.master import MasterClient
    from elasticcb.model.spec import Spec

logger = logging.getLogger(__name__)


def begin(process: RoleProcess) -> None:
    """Prepares a process before it imports TensorFlow."""
    if process.parent_pid is not None:
        # The job ends with the parent, and nobody else is left to remove the folder.
        follow_parent(process.parent_pid, lambda: remove_folder(host_of(process.master)))
        allow_many_files()
    if threading.current_thread() is threading.main_thread():
        show_as(_name(process))
        setup_logging(_name(process), "INFO", own_log())
        hold_folder(host_of(process.master))
        quiet_libraries("INFO")
        if process.role == "ps":
            hide_gpus(os.environ)  # it would take their memory from workers
    logger.info("Started")


def _name(process: RoleProcess) -> str:
    role, index = process.place
    return f"{role}-{index}" if index >= 0 else role


def begin_job(settings: JobSettings, process: RoleProcess) -> None:
    """Prepares a process for a job."""
    if threading.current_thread() is threading.main_thread():  # a thread shares logs and cores with the caller
        show_as(_name(process), settings.name)
        follow_caller()
        limit_threads(os.environ)
        logging.getLogger("elasticcb").setLevel(settings.log_level)
        limit_log_files(settings.log_file_bytes, settings.log_files_kept)
    logger.info("Job %s: %s", settings.name, settings.command.value)


def open_spec(settings: JobSettings, client: MasterClient, before: Any = None) -> Spec | None:
    """The model definition of a process's current job; None for functions without a model."""
    from elasticcb.model.model_file import ModelSpec
    from elasticcb.model.program import ProgramSpec

    if settings.model.definition:
        return ModelSpec(settings.model)
    program = client.program()
    return ProgramSpec(program, before) if program else None


@contextlib.contextmanager
def farewell(client: MasterClient, role: pb.Role, index: int) -> Iterator[None]:
    """Context that reports to the master how a process ended: by itself, or because it was asked to leave."""
    failure: BaseException | None = None
    try:
        yield
    except LeaveRequestedError as error:
        failure = error
    except BaseException as error:
        failure = error
        raise
    finally:
        _leave(client, role, index, failure)
        client.close()


def _leave(client: MasterClient, role: pb.Role, index: int, error: BaseException | None) -> None:
    text = trace = ""
    asked = isinstance(error, LeaveRequestedError)
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted on its machine"
    elif asked:
        text = str(error)
    elif error is not None:
        known = isinstance(error, ElasticCBError)
        text = str(error) if known else describe(error)
        trace = getattr(error, "user_traceback", "") if known else user_traceback(error)
        # The location of the call says nothing about why it is not answered.
        logger.error("%s", text, exc_info=None if isinstance(error, ConnectionLostError) else error)
    try:
        fatal = isinstance(error, (ModelFileError, DataError, CallbackError, SystemExit))
        client.leave(role, index, text, trace, fatal, asked)
    except ElasticCBError:
        logger.debug("The master is already gone")


def quiet_libraries(log_level: str) -> None:
    """Silences TensorFlow's and gRPC's own messages unless configured otherwise."""
    os.environ.update(quiet_environment(log_level) | os.environ)
