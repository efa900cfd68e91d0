"""A job as seen by the commands about running jobs: on this machine, started manually on several, or, where its folder
is a URL, on any.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.clients.running_master import (
    MASTER_FILE,
    can_resume,
    has_command,
    has_ended,
    is_of_cluster,
    is_starting,
    running_master,
)
from elasticcb.errors import ConnectionLostError, JobFailedError, UsageError
from elasticcb.process.host import host_name
from elasticcb.process.log_files import LogReader, say
from elasticcb.process.wording import how_many
from elasticcb.settings import JOB_FILE, STATUS_FILE, JobSettings
from elasticcb.storage import durable
from elasticcb.storage.job_store import LOGS, JobStore, holder_of
from elasticcb.storage.store_lock import newest_owner

if TYPE_CHECKING:
    from elasticcb.clients.master import MasterClient

_PATIENCE_SECONDS = 5.0  # for an answer of a master
_LOOK_SECONDS = 0.2
_START_SECONDS = 60.0  # for the master of a starting job
_TAKEOVER_SECONDS = 15.0  # for the replacement of a killed master


def wait_for_start(folder: Path, seconds: float | None = None) -> None:
    """Returns once the job in a folder is no longer starting. Raises `UsageError` when that takes too long."""
    seconds = _START_SECONDS if seconds is None else seconds
    give_up, told = time.monotonic() + seconds, False
    while is_starting(folder):
        if not told:
            say(f"The job in {folder} is starting.")
            told = True
        if time.monotonic() > give_up:
            raise UsageError(
                f"The job in {folder} is starting, but its master is not up after {seconds:g} s. Try again later."
            )
        time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def master_of(folder: Path, start_seconds: float | None = None) -> Iterator[MasterClient]:
    """A client of the job's master; waits while the job is starting.

    Raises `UsageError` when no master is up, or it does not answer.
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
    """The error for a master that does not answer."""
    if has_command(folder):
        again = "a new master replaces it within seconds; try again"
    elif can_resume(folder):
        again = f"`elasticcb resume {shlex.quote(str(folder))}` resumes the job"
    else:
        again = "start it again"
    return UsageError(f"The master of {folder} does not answer: {error} If it was killed, {again}.")


def scale_job(folder: Path, workers: int | None, ps: int | None, on_wait: Callable[[str], None]) -> Iterator[str]:
    """Changes the number of workers or parameter servers of a running job (None: unchanged); yields a message for each
    change once it is done.

    Raises `UsageError` when no job runs there, or the change is not possible.
    """
    with master_of(folder) as master:
        if workers:
            before, count = master.scale(workers), how_many(workers, "worker")
            yield f"The job now has {count} (was {before})." if workers != before else f"The job already has {count}."
        if ps:
            moved = master.scale_servers(ps, on_wait)
            yield moved or f"The job already has {how_many(ps, 'parameter server')}."


def stop_job(folder: Path, seconds: float) -> str:
    """Stops the job like Ctrl-C, and waits until its processes have exited; returns how it ended.

    Raises:
        UsageError: no job runs there, or its master is gone.
        JobFailedError: it has not ended in time, or ended with an error.
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
                f"The job in {folder} has not ended within {seconds:g} s and is still stopping. Wait longer with "
                f"--timeout, or kill it without a checkpoint: `kill {pid}` on {host}."
            )
        time.sleep(_LOOK_SECONDS)  # its master was killed; a new master may replace it
    if ended["phase"] == "failed":
        raise JobFailedError(f"The job in {folder} failed: {ended['error']}")
    if ended["phase"] == "done":
        return f"The job in {folder} had already finished."
    return str(ended["error"]) or "The job was interrupted before it started."


def _published_at(folder: Path) -> int:
    """When the job's master published its address (a replacement does so again); 0: there is none, or it is about to
    exit."""
    with contextlib.suppress(OSError):
        return (folder / MASTER_FILE).stat().st_mtime_ns
    return 0


def how_it_ended(folder: Path) -> dict[str, Any] | None:
    """The final state of the job in a folder; None: it has not ended, or was started or resumed again since."""
    if is_starting(folder):
        return None
    try:
        return durable.read_document(folder / STATUS_FILE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"The final state of the job in {folder} can't be read: {error}.") from None


def log_lines(folder: Path, process: str, lines: int, follow: bool) -> Iterator[str]:
    """The last log lines of a process of a job or `Cluster`, and with `follow` new ones until the job is over; without
    end for a `Cluster`, which may start again.

    Raises:
        UsageError: it has no log.
    """
    path = folder / "logs" / f"{process}.log"
    try:
        log = LogReader(path)
    except OSError:
        raise _no_log(folder, process) from None
    with log:
        yield from log.last(lines)
        gone_since, of_cluster = math.inf, is_of_cluster(folder)
        while follow:
            gone = has_ended(folder)
            yield from log.more()
            now = time.monotonic()
            gone_since = min(gone_since, now) if gone and not of_cluster else math.inf
            if gone and (how_it_ended(folder) is not None or now > gone_since + _TAKEOVER_SECONDS):
                return
            time.sleep(_LOOK_SECONDS)


def _no_log(folder: Path, process: str) -> UsageError:
    logs = ", ".join(sorted(log.stem for log in (folder / "logs").glob("*.log"))) or "none"
    return UsageError(
        f"The job in {folder} has no log of {process}; logs: {logs}. Processes that were started manually, or on other "
        "machines, write their logs where they run."
    )


class StoredJob:
    """The job below a URL. Raises `UsageError` if there is none, and methods raise `StoreError`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with JobStore(url) as store:
            number, owner = newest_owner(store)
        self._owner = {"folder": "", "host": "another machine", "holder": ""} | owner
        if not number:
            raise UsageError(f"There is no job in {url}. Expected the URL that `elasticcb train --job_dir` was given.")

    @property
    def local_folder(self) -> Path | None:
        """Its folder, if its last master was on this machine."""
        folder = Path(self._owner["folder"])
        is_here = self._owner["host"] == host_name() and holder_of(folder).get("holder") == self._owner["holder"]
        return folder if is_here else None

    def folder(self) -> Path:
        """Its folder on this machine. Raises `UsageError` if it is on another."""
        folder = self.local_folder
        if folder is None:
            where = self._owner["folder"]
            raise UsageError(
                f"The job in {self.url} runs, or ran, on {self._owner['host']}. Call this command there, with "
                f"{shlex.quote(where)}."
            )
        return folder

    def settings(self) -> JobSettings:
        """Its settings, as its first master had them."""
        with JobStore(self.url) as store:
            try:
                given = store.get_document(JOB_FILE)
            except FileNotFoundError:
                raise UsageError(f"The job in {self.url} ended before training started. Start a new one.") from None
        return JobSettings.from_json(given)

    def status(self) -> dict[str, Any]:
        """Its status when its master last wrote it: a few seconds ago if it runs."""
        with JobStore(self.url) as store:
            try:
                return store.get_document(STATUS_FILE)
            except FileNotFoundError:
                raise UsageError(f"The job in {self.url} has no status yet. Try again in some seconds.") from None

    def log(self, process: str) -> list[str]:
        """The lines of a process's log, which is written at the end. Raises `UsageError` if there is none."""
        with JobStore(self.url) as store:
            try:
                return store.get(f"{LOGS}/{process}.log").decode(errors="replace").splitlines(keepends=True)
            except FileNotFoundError:
                there = ", ".join(Path(name).stem for name in store.names(LOGS)) or "none"
                raise UsageError(
                    f"{self.url} has no log of {process}; logs: {there}. They are copied when the job has ended; "
                    f"until then, they are on {self._owner['host']} in {self._owner['folder']}."
                ) from None


def has_unfinished(url: str) -> bool:
    """Whether a job there has trained something and is not done. Raises `StoreError`."""
    with JobStore(url) as store:
        try:
            status = store.get_document(STATUS_FILE)
        except FileNotFoundError:
            return False
        return bool(status.get("version")) and status.get("phase") != "done"


def age(status: dict[str, Any]) -> float:
    """Seconds since a status was written; by the clock of the machine that wrote it."""
    return max(0.0, time.time() - status.get("written", time.time()))
