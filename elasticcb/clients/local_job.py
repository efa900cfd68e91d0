"""A job that runs on this machine, or by hand on several, as the commands about running jobs see it."""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.clients.running_master import MASTER_FILE, has_command, has_ended, is_starting, running_master
from elasticcb.errors import ConnectionLostError, JobFailedError, UsageError
from elasticcb.process.log_files import LogReader
from elasticcb.process.logs import say
from elasticcb.process.wording import how_many
from elasticcb.settings import JOB_FILE, STATUS_FILE
from elasticcb.storage import durable

if TYPE_CHECKING:
    from elasticcb.clients.master import MasterClient

_PATIENCE_SECONDS = 5.0  # for an answer of a master
_LOOK_SECONDS = 0.2
_START_SECONDS = 60.0  # for the master of a job that is starting
_TAKEOVER_SECONDS = 15.0  # for another master in the place of one that was killed


def wait_for_start(folder: Path, seconds: float | None = None) -> None:
    """Returns when the job in a folder is not starting, or no more. Raises `UsageError` when that takes too long."""
    seconds = _START_SECONDS if seconds is None else seconds
    give_up, told = time.monotonic() + seconds, False
    while is_starting(folder):
        if not told:
            say(f"The job in {folder} is starting.")
            told = True
        if time.monotonic() > give_up:
            raise UsageError(
                f"The job in {folder} is starting, and its master is not up after {seconds:g} s. Try again later."
            )
        time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def master_of(folder: Path, start_seconds: float | None = None) -> Iterator[MasterClient]:
    """The master of the job in a folder, to be called; of one that is starting, when it is up.

    Args:
        start_seconds: how long to wait for that; None: a minute.

    Raises `UsageError` when none is up, or it does not answer.
    """
    from elasticcb.clients.master import MasterClient

    wait_for_start(folder, start_seconds)
    master = running_master(folder)
    client = MasterClient(master.address, _PATIENCE_SECONDS, master.access)
    try:
        yield client
    except ConnectionLostError as error:
        raise lost_master(folder, error) from None
    finally:
        client.close()


def lost_master(folder: Path, error: ConnectionLostError) -> UsageError:
    """What to tell a person of a master that does not answer."""
    if has_command(folder):
        again = "another one takes its place in some seconds: try again"
    elif (folder / JOB_FILE).is_file():
        again = f"`elasticcb resume {shlex.quote(str(folder))}` goes on with the job"
    else:
        again = "start it again"
    return UsageError(f"The master of {folder} does not answer: {error} If it was killed, {again}.")


def scale_job(folder: Path, workers: int | None, ps: int | None, on_wait: Callable[[str], None]) -> Iterator[str]:
    """Gives a job that runs more or fewer workers or parameter servers (None: as many as there are), and says what was
    done, when it was.

    Args:
        on_wait: is told what has to come before the number of servers can change.

    Raises `UsageError` when no job runs there, or it can't be done.
    """
    with master_of(folder) as master:
        if workers:
            before, count = master.scale(workers), how_many(workers, "worker")
            yield f"The job now has {count} (was {before})." if workers != before else f"The job already has {count}."
        if ps:
            moved = master.scale_servers(ps, on_wait)
            yield moved or f"The job already has {how_many(ps, 'parameter server')}."


def stop_job(folder: Path, seconds: float) -> str:
    """Ends the job as Ctrl-C does, and waits until its processes are gone; says how it ended.

    Args:
        seconds: to wait.

    Raises:
        UsageError: no job runs there, or its master is gone.
        JobFailedError: it has not ended in time, or ended by an error.
    """
    give_up = time.monotonic() + seconds
    told = False
    while True:
        asked = _published_at(folder)
        try:
            with master_of(folder, max(0.0, give_up - time.monotonic())) as master:
                pid, host = master.stop()
        except UsageError:
            if not told or how_it_ended(folder) is None:
                raise
        if not told:
            say(f"The job in {folder} is stopping.")
            told = True
        while not (gone := has_ended(folder)) and _published_at(folder) in (asked, 0) and time.monotonic() < give_up:
            time.sleep(_LOOK_SECONDS)
        ended = how_it_ended(folder) if gone else None
        if ended is not None:
            break
        if time.monotonic() > give_up:
            raise JobFailedError(
                f"The job in {folder} has not ended within {seconds:g} s, and is still about to. Wait longer with "
                f"--timeout, or end it at once, without a checkpoint: `kill {pid}` on {host}."
            )
        time.sleep(_LOOK_SECONDS)  # its master was killed meanwhile; another one may take its place
    if ended["phase"] == "failed":
        raise JobFailedError(f"The job in {folder} has failed: {ended['error']}")
    if ended["phase"] == "done":
        return "The job was done before it was asked."
    return str(ended["error"]) or "The job was interrupted before it began."


def _published_at(folder: Path) -> int:
    """When the master of a job has told where it is: another one does so again; 0: there is none, or it is about to
    end."""
    with contextlib.suppress(OSError):
        return (folder / MASTER_FILE).stat().st_mtime_ns
    return 0


def how_it_ended(folder: Path) -> dict[str, Any] | None:
    """The state that the job in a folder has ended in; None: it has not, or was begun or resumed again since."""
    if is_starting(folder):
        return None
    try:
        return durable.read_document(folder / STATUS_FILE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"How the job in {folder} ended can't be read: {error}.") from None


def log_lines(folder: Path, process: str, lines: int, follow: bool) -> Iterator[str]:
    """What a process of a job wrote: the last lines, and with `follow` those to come, until the job is over.

    Args:
        process: "master", "worker-0", "ps-1".

    Raises:
        UsageError: there is no log of it.
    """
    path = folder / "logs" / f"{process}.log"
    try:
        log = LogReader(path)
    except OSError:
        logs = ", ".join(sorted(log.stem for log in path.parent.glob("*.log"))) or "none"
        raise UsageError(
            f"The job in {folder} has no log of {process}; there are: {logs}. Processes that were started by hand, or "
            "run on other machines, write where they run."
        ) from None
    with log:
        yield from log.last(lines)
        gone_since = math.inf
        while follow:
            gone = has_ended(folder)
            yield from log.more()
            now = time.monotonic()
            gone_since = min(gone_since, now) if gone else math.inf
            if gone and (how_it_ended(folder) is not None or now > gone_since + _TAKEOVER_SECONDS):
                return
            time.sleep(_LOOK_SECONDS)
