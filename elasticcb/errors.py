"""Every error that ElasticCB raises on purpose, and the exit codes of its commands.

A message says what happened, what was given, what was expected and what to do.
"""

from __future__ import annotations

import os
import traceback
from enum import IntEnum
from pathlib import Path
from typing import Any

_PACKAGE = os.path.join(str(Path(__file__).resolve().parent), "")


class ExitCode(IntEnum):
    """What the `elasticcb` command returns to the shell."""

    DONE = 0
    JOB_FAILED = 1
    WRONG_USAGE = 2
    INTERRUPTED = 130  # 128 + SIGINT, as shells count


GO_ON = 75  # exit code of a process that goes on when it is started again; EX_TEMPFAIL of sysexits.h


class ElasticCBError(Exception):
    """Base of all; shown to the user without a traceback of this project.

    `user_traceback` holds the part of a traceback that lies in the user's own code, if any.
    """

    exit_code = ExitCode.JOB_FAILED

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


class UsageError(ElasticCBError):
    """Flags or settings are wrong or contradict each other; nothing was started."""

    exit_code = ExitCode.WRONG_USAGE


class JobDoneError(UsageError):
    """A job that was to go on is done."""


class ModelFileError(ElasticCBError):
    """The user's model file can't be imported, lacks a name, or gives back something unusable."""


class DataError(ElasticCBError):
    """Training, validation or prediction data can't be read; names the file and the record."""


class DataChangedError(DataError):
    """A file of data is not what it was when the job began, for which trying again is no remedy."""


class CallbackError(ElasticCBError):
    """A hook of a user's callback raised."""


class CheckpointError(ElasticCBError):
    """A checkpoint can't be written, or is torn, foreign or missing."""


class LastCheckpointError(CheckpointError):
    """A job is done, but for its last checkpoint, which could not be written.

    Attributes:
        summary: of the job, a `JobSnapshot`.
    """

    def __init__(self, message: str, summary: Any) -> None:
        super().__init__(message)
        self.summary = summary


class TableError(ElasticCBError):
    """An embedding table can't hold or give the rows of a batch; for the same batch, trying again won't help."""


class NonFiniteError(ElasticCBError):
    """A loss or a gradient holds NaN or infinity; names the variable."""

    @classmethod
    def of(cls, reason: str) -> NonFiniteError:
        """With what may help."""
        return cls(
            f"{reason}. A smaller learning rate, clipping of gradients or other inputs may help; `non_finite=skip` "
            "passes over such batches."
        )


class WireError(ElasticCBError):
    """A message that breaks the protocol: wrong names, shapes, dtypes or sizes."""


class ConnectionLostError(ElasticCBError):
    """A process of the job could not be reached within the time allowed."""


class TLSError(ElasticCBError):
    """Two processes of a job can't agree on TLS, or one refuses the other's certificate; trying again won't help."""


class JobOverError(ElasticCBError):
    """A process works on a job that is over; the next one waits for it."""


class ImageError(ElasticCBError):
    """A container image could not be built or pushed."""


class LeaveRequestedError(ElasticCBError):
    """A process was asked to end while its job goes on, and has put down its work."""

    def __init__(self) -> None:
        super().__init__("it was asked to end")


class JobFailedError(ElasticCBError):
    """The job can't go on; carries the story of what failed."""


class HandlerError(JobFailedError):
    """A process of the job could not answer a call because of a defect; trying again won't help."""


class ClusterLostError(JobFailedError):
    """Processes of the job are gone, and nothing may take their places; the program itself has no fault."""


class ReplacedError(JobFailedError):
    """Another master goes on with the job; this one must leave all files and processes alone."""


class LostServerError(ClusterLostError):
    """A parameter server is gone which can't be replaced alone; the whole job can go on from what all wrote down."""


class FunctionError(ElasticCBError):
    """A function of `Cluster.schedule` raised an error, which is the cause, or was cancelled since another one did."""


class JobInterrupted(ElasticCBError):
    """The user asked the job to end before it was done."""

    exit_code = ExitCode.INTERRUPTED


def describe(error: BaseException) -> str:
    """ "ValueError: what it says", without the lines of code that TensorFlow puts into messages."""
    text = str(error)
    if "in user code:" in text:  # the last line says it, with the type
        return text.strip().splitlines()[-1].strip()
    return f"{type(error).__name__}: {text}"


def is_users_own(filename: str) -> bool:
    """Whether a file is neither of this package nor of an installed library."""
    return not filename.startswith(_PACKAGE) and "site-packages" not in filename


def user_traceback(error: BaseException) -> str:
    """The traceback of an error and its causes, with the user's own lines alone.

    The frames of this package are left out, and those of installed libraries where any others are left.
    """
    summary = traceback.TracebackException.from_exception(error)
    pending = [summary]
    while pending:
        part = pending.pop()
        theirs = [frame for frame in part.stack if not frame.filename.startswith(_PACKAGE)]
        own = [frame for frame in theirs if is_users_own(frame.filename)]
        if own or theirs:  # else the mistake is ours, and the frames are all there is to find it by
            part.stack = traceback.StackSummary.from_list(own or theirs)
        pending.extend(cause for cause in (part.__cause__, part.__context__) if cause is not None)
    return "".join(summary.format())
