"""Runs a job from checked flags."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.cli.command import CommandRun
from elasticcb.cli.exits import exit_code
from elasticcb.cli.job_folders import JOBS, new_folder, remove_unbegun, was_refused
from elasticcb.cli.kubernetes.submit import kubernetes_settings, submit
from elasticcb.cli.validation import names_predictions, prediction_format, validate
from elasticcb.clients.local_job import has_unfinished
from elasticcb.clients.running_master import command_runs, is_starting
from elasticcb.cluster.base import MasterRun
from elasticcb.cluster.kubernetes.pods import PRIVATE_FOLDER
from elasticcb.cluster.registry import backend_of, backends
from elasticcb.dashboard.beside import page_beside
from elasticcb.errors import (
    GO_ON,
    ElasticCBError,
    ExitCode,
    JobDoneError,
    JobFailedError,
    JobInterrupted,
    LostServerError,
    UsageError,
)
from elasticcb.process.host import POD_NAME
from elasticcb.process.log_files import print_line, say
from elasticcb.process.signals import sigterm_interrupts
from elasticcb.process.system import show_as
from elasticcb.security.socket_folder import make_private
from elasticcb.settings import JOURNAL_FILE, MODEL_FOLDER, Command, Given, JobSettings
from elasticcb.settings.checks import completed, earlier_flags
from elasticcb.settings.names import SETTINGS
from elasticcb.storage.folder_lock import ENDING_SECONDS, FolderLock
from elasticcb.storage.local_folders import next_numbered
from elasticcb.storage.remote_files import is_url

if TYPE_CHECKING:
    from elasticcb.cluster.local.fork_server import ForkServer


def run_job(given: Given, session: CommandRun) -> None:
    """Checks the flags, then runs the job until it ends.

    Raises:
        UsageError: the flags are wrong; nothing was started.
        ElasticCBError: the job failed or was interrupted.
    """
    backend = backends().get(given["cluster"])
    if backend is not None and backend.submits(given):
        end_with(submit(given))
    else:
        if given["dry_run"]:
            from elasticcb.cli.dry_run import dry_run  # not for other commands

            with tempfile.TemporaryDirectory(prefix="elasticcb-dry-run-") as folder, _not_begun():
                dry_run(build_settings(given, folder), given["job_dir"] or "")
            return
        there = bool(given["job_dir"]) and Path(given["job_dir"]).exists()
        with _not_begun():
            settings = build_settings(given)
        try:
            run_settings(settings, session)
        except (ElasticCBError, SystemExit) as error:
            code = error.code if isinstance(error, SystemExit) else error.exit_code
            if (code == ExitCode.WRONG_USAGE and not there) or (
                code == ExitCode.JOB_FAILED and not given["job_dir"] and was_refused(Path(settings.directory))
            ):
                remove_unbegun(Path(settings.directory))
            raise


def end_with(code: int) -> None:
    """Ends this process with an exit code other than 0."""
    if code:
        sys.exit(code)


def run_settings(settings: JobSettings, session: CommandRun, resumed: bool = False) -> None:
    """Runs a job until it ends.

    Raises `ElasticCBError` if the job fails or is interrupted.
    """
    with _not_begun(resumed):
        from elasticcb.cli.progress import start_spinner  # not for a command with invalid flags

        if not resumed and POD_NAME not in os.environ:  # a later pod of a master continues its job
            refuse_unfinished(settings)
        show_header(settings)
        spinner = start_spinner(settings)

    def here(goes_on: bool, since: float) -> None:
        spinner.stop()
        _run_master(settings, goes_on, None, since)

    run = MasterRun(settings, resumed, session.own_process, session.debug, here, say, spinner.stop)
    folder = settings.directory
    try:
        # The dashboard ends last, so that a stop request from the page is answered after the job has ended.
        page = page_beside(folder, settings.cluster.dashboard, True)
        with page, command_runs(Path(folder)), _not_begun(resumed, Path(folder)):
            backend_of(settings.cluster.kind).run_master(run)
    finally:
        spinner.stop()


@contextlib.contextmanager
def _not_begun(resumed: bool = False, folder: Path | None = None) -> Iterator[None]:
    """While a job has not begun, SIGTERM is like Ctrl-C: raises `JobInterrupted`, whose message says so.

    Args:
        folder: the job's folder, if its master may start meanwhile; afterwards, the interrupt is raised as it is.
    """
    try:
        with sigterm_interrupts():
            yield
    except KeyboardInterrupt:
        if folder is not None and not is_starting(folder):
            raise
        why = "was resumed: its state is unchanged" if resumed else "began: no record was processed. Start it again"
        raise JobInterrupted(f"Interrupted before the job {why}.") from None


def refuse_unfinished(settings: JobSettings) -> None:
    """Raises `UsageError` if a new job would replace one that can be resumed, perhaps after a repair of its journal, or
    would delete its recovery files."""
    from elasticcb.master.job_copy import refuse_copy
    from elasticcb.master.journal import Journal

    if settings.store and has_unfinished(settings.store):
        raise UsageError(
            f"{settings.store} contains a job that has not finished; a new job would replace it. Run `elasticcb resume "
            f"{shlex.quote(settings.store)}`, choose another --job_dir, or delete the folder."
        )
    folder = Path(settings.directory)
    refuse_copy(folder)
    path = folder / JOURNAL_FILE
    if not path.is_file():
        return
    with FolderLock(folder, wait_seconds=ENDING_SECONDS):
        if not path.stat().st_size:  # the job ended before its first batch
            return
        try:
            memory = Journal(path).memory
        except JobFailedError as error:
            raise UsageError(str(error)) from error
    if memory.version and not memory.over:
        raise UsageError(
            f"{folder} contains a job that has not finished, at version {memory.version}; a new job would replace it. "
            f"Run `elasticcb resume {shlex.quote(str(folder))}`, choose another --job_dir, or delete the folder."
        )


def show_header(settings: JobSettings) -> None:
    """The first lines that a job prints: its folder, and the command for its status."""
    from elasticcb.cli.progress import redraws

    name = "" if redraws(settings) else f"[{settings.name}] "  # like the lines below it
    here = f"; on this machine {settings.directory}" if settings.store else ""
    print_line(f"{name}The job's folder is {settings.store or settings.directory}{here}")
    if POD_NAME not in os.environ:  # in a pod, `status` is called from elsewhere, with --namespace
        print_line(f"{name}Status: elasticcb status {_job_argument(settings)}")


def _job_argument(settings: JobSettings) -> str:
    """The JOB argument of this job, relative to the working directory."""
    folder = Path(settings.directory)
    return shlex.quote(folder.name if folder.parent == Path.cwd() / JOBS else str(folder))


def run_as_master(request: dict[str, Any], fork_server: ForkServer) -> int:
    """Runs a master that the launcher has started; returns its exit code."""
    from elasticcb.process.system import follow_parent

    follow_parent(os.getppid())
    settings = JobSettings.from_json(request["settings"])
    show_as("master", settings.name)

    def run() -> None:
        try:
            with _not_begun(request["resumed"], Path(settings.directory)):
                _run_master(settings, request["resumed"], fork_server, request["since"])
        except LostServerError as error:
            say(str(error).splitlines()[0])
            sys.exit(GO_ON)
        except JobDoneError:
            if not request["since"]:
                raise
            say("The job was done when its master was killed.")

    return exit_code(run, CommandRun(own_process=True, debug=request["debug"]))


def _run_master(settings: JobSettings, resumed: bool, fork_server: ForkServer | None, since: float) -> None:
    # Only now: what these import takes seconds, and a mistake in the flags should be told at once.
    from elasticcb.cli.progress import make_display
    from elasticcb.roles.master import run_master

    display = make_display(settings)
    try:
        run_master(settings, display, resumed, fork_server, since)
    finally:
        display.close()


def build_settings(given: Given, folder: str = "") -> JobSettings:
    """Checks the flags and makes the job's folder; all paths in the settings are absolute.

    Args:
        folder: the job's folder in place of the user's, for a dry run.

    Raises:
        UsageError: the message lists all problems.
    """
    origins = validate(given)
    settings = completed(given.settings(), given)
    for line in earlier_flags(settings, given):
        say(line)
    data: dict[str, Any] = {SETTINGS[name].field: origin for name, origin in origins.items()}
    name = settings.name or _default_name(settings.model.definition)
    store = settings.directory.rstrip("/") if is_url(settings.directory) else ""
    directory = "" if store else settings.directory
    if POD_NAME in os.environ and store:  # a later pod looks there for what a killed master has left
        directory = f"{PRIVATE_FOLDER}/{name}"
    directory = folder or directory or str(new_folder(Path.cwd() / JOBS, settings.command, name))
    make_private(Path(directory))
    if settings.command is Command.PREDICT:
        wanted = names_predictions(given)
        settings = replace(
            settings,
            output=settings.output if wanted else "",
            output_format=prediction_format(given) if wanted else settings.output_format,
        )
    if given["numbered"] and settings.output:
        settings = replace(settings, output=str(next_numbered(settings.output)))
    checkpoint = settings.checkpoint
    is_kept = store or not directory.startswith(f"{PRIVATE_FOLDER}/")
    if settings.command is Command.TRAIN and is_kept and not checkpoint.directory:
        checkpoint = replace(checkpoint, directory=f"{store or directory}/{MODEL_FOLDER}")
    return replace(
        settings,
        name=name,
        directory=directory,
        store=store,
        checkpoint=checkpoint,
        data=replace(settings.data, **data),
        cluster=replace(settings.cluster, kubernetes=kubernetes_settings(given)),
    )


def _default_name(definition: str) -> str:
    """ "mnist.mnist_functional.custom_model" -> "mnist-mnist_functional"; a repeated part occurs once."""
    return "-".join(dict.fromkeys(definition.split(".")[:-1]))
