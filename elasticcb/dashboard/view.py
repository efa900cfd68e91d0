"""A job as its page shows it: what the master tells now, or its folder when it is over, and its past."""

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

_PATIENCE_SECONDS = 3.0  # for an answer of the master
_RATES = 60  # of each worker, one a look


class JobView:
    """Looks at a job again and again. One thread at a time may call it.

    Args:
        folder: of the job, which runs or has ended.

    Attributes:
        status: as `elasticcb status --json` shows it; None: nothing is known yet.
        over: the job has ended.
        trouble: why `status` is not of now; "": it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status: dict[str, Any] | None = None
        self.over = False
        self.trouble = ""
        self._history = History()
        self._running: list[Any] = []  # tasks
        self._rates: dict[int, deque[float]] = {}  # records per second of workers, by place
        self._known = (0.0, 0)  # which past of the master is taken in, up to which entry
        self._shown = 0  # entries that `news` has given
        self._master: tuple[RunningMaster, MasterClient] | None = None

    def look(self) -> None:
        """Takes in how the job is now."""
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
        """What has changed since the last call, as JSON values."""
        found = self._told(self._history.after(self._shown))
        self._shown = self._history.number
        return found

    def everything(self) -> dict[str, Any]:
        """All up to the last `news`, likewise."""
        rates = {place: list(rates) for place, rates in self._rates.items()}
        return {**self._told(self._history.after(0)), "rates": rates, "whole": True}

    def close(self) -> None:
        """Ends the connection to the master."""
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
            if past["run"] != self._known[0] and self._known[1]:  # another master has taken its place, or another job
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
        """The past that the master has left in the folder."""
        with contextlib.suppress(OSError, ValueError):
            return durable.read_document(self.folder / HISTORY_FILE)
        return {}

    def _take_in(self, past: dict[str, Any]) -> None:
        before, known = self._known
        run = past.get("run", before)
        with contextlib.suppress(TypeError, ValueError):  # of another release
            if run == before:
                self._history.extend(past, after=known)
            else:  # a job that was resumed has its whole past, of which what came before is known here
                self._history.extend(past, since=run if known else 0.0)
        self._known = run, past.get("number", known)
        self._running = [] if self.over else past.get("running", [])

    def _note_rates(self, status: dict[str, Any]) -> None:
        for process in status["processes"]:
            if process["role"] == "worker":
                rates = self._rates.setdefault(process["index"], deque(maxlen=_RATES))
                rates.append(process["records_per_second"] or 0.0)


def token_of(folder: Path) -> str:
    """The token of the job in a folder; "": it has ended. Raises `UsageError` when it neither runs nor has ended."""
    return "" if how_it_ended(folder) is not None else running_master(folder).token
