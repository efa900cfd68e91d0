"""The view of a job for its dashboard: the master's current report, or the files of an ended job, and its history."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any

from elasticcb.clients.history import History
from elasticcb.clients.local_job import how_it_ended, lost_master
from elasticcb.clients.master import MasterClient
from elasticcb.clients.running_master import RunningMaster, running_master
from elasticcb.errors import ConnectionLostError, ElasticCBError
from elasticcb.settings import HISTORY_FILE
from elasticcb.storage import durable

_PATIENCE_SECONDS = 3.0  # seconds for an answer of the master
_RATES = 60  # per worker, one per poll


class JobView:
    """Polls a job. Only one thread at a time may call it.

    Attributes:
        status: as in `elasticcb status --json`; None: unknown yet.
        trouble: why `status` is outdated; "": it is current.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status: dict[str, Any] | None = None
        self.over = False
        self.trouble = ""
        self._history = History()
        self._running: list[Any] = []  # tasks
        self._rates: dict[int, deque[float]] = {}  # records per second of workers, by index
        self._known = (0.0, 0)  # id of the master's history, and the last entry read
        self._shown = 0  # entries that `news` has returned
        self._kept_as = (0, 0, 0)  # inode, time and size of the history file that was read last
        self._master: tuple[RunningMaster, MasterClient] | None = None

    def look(self) -> None:
        """Updates the view."""
        try:
            ended = how_it_ended(self.folder)
            if ended is None:
                self.status, past = self._ask()
                self._note_rates(self.status)
            else:
                self.close()
                self.status, past = ended, self._kept()
            self.over, self.trouble = ended is not None, ""
            self._take_in(past)
        except ElasticCBError as error:
            self.trouble = str(error)

    def news(self) -> dict[str, Any]:
        """The changes since the last call, as JSON values."""
        found = self._told(self._history.after(self._shown))
        self._shown = self._history.number
        return found

    def everything(self) -> dict[str, Any]:
        """Everything up to the last `news`, as JSON values."""
        rates = {place: list(rates) for place, rates in self._rates.items()}
        return {**self._told(self._history.after(0)), "rates": rates, "whole": True}

    def close(self) -> None:
        """Closes the connection to the master."""
        if self._master is not None:
            self._master[1].close()
            self._master = None

    def _told(self, past: dict[str, Any]) -> dict[str, Any]:
        logs = sorted(path.stem for path in (self.folder / "logs").glob("*.log"))
        state = {"status": self.status, "over": self.over, "trouble": self.trouble, "running": self._running}
        return {**state, "past": past, "logs": logs, "folder": str(self.folder)}

    def _ask(self) -> tuple[dict[str, Any], dict[str, Any]]:
        client = self._connected()
        try:
            status, past = client.status_and_past(self._known[1])
            if past["run"] != self._known[0] and self._known[1]:  # another master replaced it, or it is another job
                status, past = client.status_and_past(0)
            return status, past
        except ConnectionLostError as error:
            self.close()
            raise lost_master(self.folder, error) from None

    def _connected(self) -> MasterClient:
        found = running_master(self.folder)
        if self._master is None or self._master[0] != found:
            self.close()
            self._master = found, MasterClient(found.address, _PATIENCE_SECONDS, found.access)
        return self._master[1]

    def _kept(self) -> dict[str, Any]:
        """The history that the master left in the folder; {}: it was read before."""
        path = self.folder / HISTORY_FILE
        with contextlib.suppress(OSError, ValueError):
            status = path.stat()
            before, self._kept_as = self._kept_as, (status.st_ino, status.st_mtime_ns, status.st_size)
            if self._kept_as != before:
                return durable.read_document(path)
        return {}

    def _take_in(self, past: dict[str, Any]) -> None:
        before, known = self._known
        run = past.get("run", before)
        with contextlib.suppress(TypeError, ValueError):  # of another release
            if run == before:
                self._history.extend(past, after=known)
            else:  # a resumed job has its complete history, of which the earlier part is known here
                self._history.extend(past, since=run if known else 0.0)
        self._known = run, past.get("number", known)
        self._running = [] if self.over else past.get("running", [])

    def _note_rates(self, status: dict[str, Any]) -> None:
        for process in status["processes"]:
            if process["role"] == "worker":
                rates = self._rates.setdefault(process["index"], deque(maxlen=_RATES))
                rates.append(process["records_per_second"] or 0.0)


def token_of(folder: Path) -> str:
    """The token of the job in a folder; "": it has ended. Raises `UsageError` if there is no such job."""
    return "" if how_it_ended(folder) is not None else running_master(folder).token
