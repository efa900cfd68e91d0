"""Jobs whose folder is a URL, as seen by commands on any machine."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from pathlib import Path
from typing import Any

from elasticcb.errors import UsageError
from elasticcb.process.host import host_name
from elasticcb.settings import JOB_FILE, STATUS_FILE, JobSettings
from elasticcb.storage.job_store import LOGS, JobStore, holder_of


class StoredJob:
    """The job below a URL. Raises `UsageError` if there is none, and methods raise `StoreError`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with contextlib.closing(JobStore(url)) as store:
            number, self._owner = store.newest_owner()
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
        with contextlib.closing(JobStore(self.url)) as store:
            try:
                given = json.loads(store.get(JOB_FILE))
            except FileNotFoundError:
                raise UsageError(f"The job in {self.url} ended before training started. Start a new one.") from None
        return JobSettings.from_json(json.dumps(given))

    def status(self) -> dict[str, Any]:
        """Its status when its master last wrote it: a few seconds ago if it runs."""
        with contextlib.closing(JobStore(self.url)) as store:
            try:
                return dict(json.loads(store.get(STATUS_FILE)))
            except FileNotFoundError:
                raise UsageError(f"The job in {self.url} has no status yet. Try again in some seconds.") from None

    def log(self, process: str) -> list[str]:
        """The lines of a process's log, which is written at the end. Raises `UsageError` if there is none."""
        with contextlib.closing(JobStore(self.url)) as store:
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
    with contextlib.closing(JobStore(url)) as store:
        try:
            status = json.loads(store.get(STATUS_FILE))
        except FileNotFoundError:
            return False
        return bool(status["version"]) and status["phase"] != "done"


def age(status: dict[str, Any]) -> float:
    """Seconds since a status was written; by the clock of the machine that wrote it."""
    return max(0.0, time.time() - status.get("written", time.time()))
