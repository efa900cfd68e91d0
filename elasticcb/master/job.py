"""A job as a sequence of phases: it starts (`startup.py`), runs (`job_driver.py`), and ends, also with an error."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from elasticcb.compute.registry import chosen_backend
from elasticcb.errors import (
    ClusterLostError,
    ConnectionLostError,
    ElasticCBError,
    JobFailedError,
    JobInterrupted,
    LastCheckpointError,
    ReplacedError,
)
from elasticcb.master.callback_arrays import CallbackArrays
from elasticcb.master.job_context import JobContext, Takeover
from elasticcb.master.job_driver import JobDriver
from elasticcb.master.journal import Journal, Memory
from elasticcb.master.master import Master
from elasticcb.master.members import Role
from elasticcb.master.report import Report
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.startup import open_job
from elasticcb.model.program import callback_params
from elasticcb.optimizers.state import ModelState
from elasticcb.process.stats import Stats
from elasticcb.settings import RECOVERY_FOLDER, Command, JobSettings

_DRAIN_SECONDS = 5.0  # for running tasks when the user interrupts
_RESTORE_SECONDS = 20.0  # for lost servers when the user interrupts
_LEAVE_SECONDS = 30.0  # for workers to exit by themselves after the job


class Job:
    """One job.

    Args:
        make_host: creates the master's Keras side; called once the processes are starting.
        make_program: creates the serialized job to run instead of a model file (elasticcb/model/program.py), once the
            host's model is built.
        journal: journal of resumable training; the job continues it if it contains tasks. If its training was over, the
            servers get the model and no hook is called.
        goes_on_by: how the user resumes the job, as text; "": the command `elasticcb resume`.
        takeover: what a killed master left running, which this job takes over; `master` is not started in that case.
    """

    def __init__(
        self,
        settings: JobSettings,
        master: Master,
        display: Any,
        make_host: Callable[[JobSettings], Any] | None = None,
        make_program: Callable[[], bytes] | None = None,
        journal: Journal | None = None,
        goes_on_by: str = "",
        takeover: Takeover | None = None,
    ) -> None:
        memory = journal.memory if journal is not None and journal.memory.begun else Memory()
        report = Report(master, settings, display)
        before = time.time() - memory.began if memory.began and takeover is not None else 0.0
        self._context = JobContext(
            settings=replace(settings, keras_backend=chosen_backend()),
            master=master,
            started=time.monotonic() - max(before, 0.0),
            report=report,
            make_host=make_host or _host_of_model_file,
            make_program=make_program,
            journal=journal,
            memory=memory,
            run=memory.run or secrets.token_hex(8),
            takeover=takeover,
            arrays=CallbackArrays(Path(settings.directory, RECOVERY_FOLDER), memory.callback_arrays, report.message),
            goes_on_by=goes_on_by,
        )
        self._course: JobDriver | None = None  # None until the servers hold the model and workers get tasks

    def run(self) -> JobSnapshot:
        """Runs the job to its end.

        Raises:
            JobFailedError: the job can't continue.
            JobInterrupted: the user stopped it.
            LastCheckpointError: everything is done except the last checkpoint.
            ElasticCBError: the model file, the data or the checkpoint is unusable.
        """
        try:
            course = self._course = open_job(self._context)
            while not course.over:
                course.turn()
        except KeyboardInterrupt:
            self._check_not_replaced()
            self._interrupted()
        except ReplacedError:
            raise
        except (JobFailedError, ConnectionLostError) as error:
            self._check_not_replaced()
            raise self._explained(error) from error
        return self._finish(course)

    def model_state(self) -> ModelState | None:
        """The servers' current state; None before they hold the model."""
        return None if self._course is None else self._course.served.ps.export()

    def close(self) -> None:
        """Closes the connections to the servers."""
        context = self._context
        context.until_end.close()
        context.server.keep(None)  # workers may still report
        with context.server.state() as state:
            output, state.prediction_output = state.prediction_output, None
        if output is not None:
            output.remove()
        if context.journal is not None:
            context.journal.close()

    def _finish(self, course: JobDriver) -> JobSnapshot:
        """Waits for workers and checkpoints; returns the summary."""
        context, server, journal = self._context, self._context.server, self._context.journal
        server.wait_until(lambda state: not state.roster.busy(Role.WORKER), _LEAVE_SECONDS)
        with server.state() as state:
            if state.error is not None:
                raise state.error
        missing = course.finish_checkpoints()
        refused = course.served.ps.refused_calls()
        exported = callback_params(context.settings)["saved_model_path"]
        with server.state() as state:
            for place, calls in zip(course.served.servers.places, refused, strict=True):
                stats = state.stats.get(place.id, Stats())
                state.stats[place.id] = replace(stats, refused_calls=calls)
            state.set_status(saved_model_path=exported if os.path.isdir(exported) else "")
        summary = context.master.observe()
        if missing is not None and context.make_program is None:
            again = f" After fixing this, run: {context.how_to_go_on}" if journal is not None else ""
            raise LastCheckpointError(f"The job finished without its last checkpoint: {missing}{again}", summary)
        if journal is not None:
            with server.state():
                journal.add(over=True)
        if missing is not None:
            raise LastCheckpointError(f"The model was trained, but its last checkpoint is missing: {missing}", summary)
        return summary

    def _explained(self, error: ElasticCBError) -> ElasticCBError:
        """The error, with advice for the user."""
        context = self._context
        if isinstance(error, ConnectionLostError):
            try:
                context.server.tend()  # raises the reason why a server does not answer
            except JobFailedError as cause:
                error = cause
        hints = ""
        newest = "" if self._course is None else self._course.checkpoints.newest
        if newest:
            hints += f"\nThe newest checkpoint is {newest}."
            if context.make_program is None:
                hints += f" To start a job from it: --checkpoint_dir_for_init={context.settings.checkpoint.directory}"
        if self._is_resumable:
            hints += f"\nTo resume the job: {context.how_to_go_on}"
        kind = type(error) if isinstance(error, JobFailedError) else ClusterLostError
        return kind(f"{error}{hints}", error.user_traceback) if hints else error

    def _check_not_replaced(self) -> None:
        """Raises `ReplacedError` when another master has taken over the job, its processes and files."""
        journal = self._context.journal
        if journal is not None:
            with self._context.server.state():
                journal.check_not_replaced()

    def _interrupted(self) -> NoReturn:
        """Drains, checkpoints, and ends the job by raising `JobInterrupted`."""
        saved = ""
        try:
            if self._course is not None and self._context.settings.command is Command.TRAIN:
                saved = self._saved(self._course)
        except KeyboardInterrupt:
            pass
        except ReplacedError:
            raise
        except ElasticCBError as error:
            saved = f" The checkpoint could not be written: {error}"
        if self._is_resumable:
            saved += f" To resume it: {self._context.how_to_go_on}"
        raise JobInterrupted(f"The job was interrupted at version {self._context.server.version}.{saved}")

    def _saved(self, course: JobDriver) -> str:
        """Saves the trained state; returns where, as text for the user."""
        context = self._context
        again = "" if context.goes_on_by else " (press Ctrl-C again to end at once)"
        context.report.message(f"Interrupted: finishing running tasks{again}.")
        course.served.servers.give_up_after(_RESTORE_SECONDS)
        course.drain(_DRAIN_SECONDS)
        if context.journal is not None:
            course.served.ps.finish_training()  # so that the recovery files contain everything
            course.served.servers.save()
        course.finish_exports()
        if not course.checkpoints.wanted:
            return ""
        course.save_checkpoint()
        missing = course.finish_checkpoints(retry=False)
        if missing is not None:
            raise missing
        newest = course.checkpoints.newest
        return f" The newest checkpoint is {newest}." if newest else ""

    @property
    def _is_resumable(self) -> bool:
        context = self._context
        is_there = Path(context.settings.directory).is_dir()  # the user may have removed it
        return is_there and context.journal is not None and (self._course is not None or context.resumes)


def _host_of_model_file(settings: JobSettings) -> Any:
    # Keras is imported here, not above: other processes import it in parallel.
    from elasticcb.master.keras_host import ModelHost

    return ModelHost(settings)
