"""All errors that ElasticCB raises on purpose, and the exit codes of its commands.

A message says what happened, what was given, what was expected, and what to do.
"""

from __future__ import annotations

import itertools
import os
import traceback
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

_PACKAGE = os.path.join(str(Path(__file__).resolve().parent), "")
GENERATED = "__autograph_generated_file"  # prefix of the files and modules that AutoGraph generates


class ExitCode(IntEnum):
    """Exit codes of the `elasticcb` command."""

    DONE = 0
    JOB_FAILED = 1
    WRONG_USAGE = 2
    INTERRUPTED = 130  # 128 + SIGINT, as in shells


GO_ON = 75  # exit code of a process that continues when it is restarted; EX_TEMPFAIL of sysexits.h


class ElasticCBError(Exception):
    """Base class of all errors; shown to the user without a traceback of this project.

    `user_traceback` has the frames of the traceback in the user's code, if any.
    """

    exit_code = ExitCode.JOB_FAILED

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(readable(message))
        self.user_traceback = readable(user_traceback)


class UsageError(ElasticCBError):
    """Flags or settings are invalid or contradictory; nothing was started."""

    exit_code = ExitCode.WRONG_USAGE


class JobDoneError(UsageError):
    """The job to continue is already done."""


class ModelFileError(ElasticCBError):
    """The user's model file can't be imported, lacks a name, or returns something unusable."""


class DataError(ElasticCBError):
    """Training, validation or prediction data can't be read; the message names the file and the record."""


class SourceError(DataError):
    """A file or a stream can't be read; none of its records is at fault."""


class DataChangedError(SourceError):
    """A data file has changed since the job started; retrying does not help."""


class StreamError(SourceError):
    """A source that grows can't be reached now; it is asked again."""


class CallbackError(ElasticCBError):
    """A hook of a user's callback raised an error."""


class CheckpointError(ElasticCBError):
    """A checkpoint can't be written, or is incomplete, foreign or missing."""


class StoreError(CheckpointError):
    """A URL can't be read or written now."""


class LastCheckpointError(CheckpointError):
    """A job is done, but its last checkpoint could not be written."""

    def __init__(self, message: str, summary: Any) -> None:
        super().__init__(message)
        self.summary = summary


class TableError(ElasticCBError):
    """An embedding table can't store or return the rows of a batch; retrying the batch does not help."""


class NonFiniteError(ElasticCBError):
    """A loss or a gradient contains NaN or infinity; the message names the variable."""

    @classmethod
    def of(cls, reason: str) -> NonFiniteError:
        """Creates the error, with advice."""
        return cls(
            f"{reason}. Try a smaller learning rate or gradient clipping, and check the inputs; `non_finite=skip` "
            "skips such batches."
        )


class WireError(ElasticCBError):
    """A message violates the protocol: wrong names, shapes, dtypes or sizes."""


class ConnectionLostError(ElasticCBError):
    """A process of the job could not be reached in time."""


class TLSError(ElasticCBError):
    """Two processes of a job disagree on TLS, or one refuses the other's certificate; retrying does not help."""


class JobOverError(ElasticCBError):
    """A process is working on a job that has ended; the next job waits for it."""


class ImageError(ElasticCBError):
    """A container image could not be built or pushed."""


class LeaveRequestedError(ElasticCBError):
    """A process was asked to exit while its job continues, and has saved or handed back its work."""

    def __init__(self) -> None:
        super().__init__("it was asked to end")


class JobFailedError(ElasticCBError):
    """The job can't continue; the message says what failed."""


class HandlerError(JobFailedError):
    """A process of the job could not answer a call because of a bug; retrying does not help."""


class ClusterLostError(JobFailedError):
    """Processes of the job are gone and can't be replaced; the program itself is not at fault."""


class ReplacedError(JobFailedError):
    """Another master continues the job; this one must not touch any files or processes."""


class LostServerError(ClusterLostError):
    """A lost parameter server can't be replaced alone; the whole job can restart from the servers' files."""


class FunctionError(ElasticCBError):
    """A function of `Cluster.schedule` raised an error, which is the cause, or was cancelled because another
    function did."""


class JobInterrupted(ElasticCBError):
    """The user stopped the job before it was done."""

    exit_code = ExitCode.INTERRUPTED


def describe(error: BaseException) -> str:
    """ "ValueError: message", without the lines of code that TensorFlow adds to messages."""
    try:
        text = readable(str(error))
    except Exception:  # of a user's __str__
        text = "(its message can't be shown)"
    converted = getattr(error, "ag_error_metadata", None)
    if converted is not None:  # by AutoGraph, whose text repeats the traceback
        return readable(converted.cause_message)
    if "in user code:" in text:  # the last line has the message, with the type
        return text.strip().splitlines()[-1].strip()
    return f"{type(error).__name__}: {text}"


def readable(text: str) -> str:
    """Without what no encoding has, such as parts of a file's name that Python could not decode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def is_users_own(filename: str) -> bool:
    """Whether a file belongs neither to this package nor to an installed library, and was not generated."""
    return not filename.startswith(_PACKAGE) and "site-packages" not in filename and GENERATED not in filename


def user_traceback(error: BaseException) -> str:
    """The traceback of an error and its causes, reduced to the user's frames.

    Frames of this package are removed, and frames of installed libraries if others remain. Frames of code that
    AutoGraph has converted are those of the user's source.
    """
    summary = traceback.TracebackException.from_exception(error)
    shorter: dict[str, str] = {}  # instead of a message that repeats the traceback
    pending: list[tuple[Any, Any]] = [(summary, error)]
    while pending:
        part, raised = pending.pop()
        frames = list(part.stack)
        converted = getattr(raised, "ag_error_metadata", None)
        if converted is not None:
            frames = _frames_of_source(frames, converted.translated_stack)
            shorter["".join(part.format_exception_only())] = f"{converted.cause_message}\n"
        theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
        own = [frame for frame in theirs if is_users_own(frame.filename)]
        if own or theirs:  # otherwise the bug is ours, and we need the frames to find it
            part.stack = traceback.StackSummary.from_list(own or theirs)
        causes = ((part.__cause__, raised.__cause__), (part.__context__, raised.__context__))
        pending.extend(cause for cause in causes if None not in cause)
    text = "".join(summary.format())
    for message, short in shorter.items():
        text = text.replace(message, short)
    return readable(text)


def _frames_of_source(frames: list[Any], translated: Any) -> list[Any]:
    """The frames up to AutoGraph's first, and then those of the converted code, which AutoGraph lists from the
    innermost one."""
    called = itertools.takewhile(lambda frame: GENERATED not in frame.filename, frames)
    inner = (traceback.FrameSummary(at.filename, at.lineno, at.function_name, line=at.code) for at in translated[::-1])
    return [*called, *inner]


@dataclass(frozen=True)
class CallbackWarning:
    """A warning about a callback, shown once, even if several processes send it."""

    subject: str  # identifies duplicates: "Watch.on_test_end failed"
    text: str
    errors: int = 0  # errors of a hook after which the job continues
