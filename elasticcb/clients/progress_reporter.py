"""What a worker reports to the master while it works: progress, batches for callbacks, what they print, warnings."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from elasticcb.clients.master import MasterClient
from elasticcb.errors import ElasticCBError, readable
from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb

logger = logging.getLogger(__name__)

_EVENTS_PER_REPORT = 2_000
_REPORT_SECONDS = 0.5  # between reports
_MAX_EVENTS = 100_000  # maximum number of unsent events
_MAX_CHARACTERS = 1 << 20  # that wait


class ProgressReporter:
    """Reports the progress of the current task at intervals; sends heartbeats between tasks.

    Attributes:
        on_split: called when idle workers wait for the rest of a task.
        lost_leases: leases revoked by the master, or by the end of the job.
        splits: by lease, the number of records after which to split.
    """

    def __init__(self, client: MasterClient, interval_seconds: float | None = None) -> None:
        self._client = client
        self._interval = _REPORT_SECONDS if interval_seconds is None else interval_seconds
        self._lock = threading.Lock()  # protects `_progress`
        self._sending = threading.Lock()  # one report at a time, so that they arrive in order
        self._progress = pb.ReportProgressRequest()
        self._events: list[pb.BatchEvent] = []  # not sent yet
        self._warnings: dict[str, pb.CallbackWarning] = {}  # not sent yet, by subject
        self._printed = _PrintedText()  # not sent yet
        self._ends_lines = False  # whether the next report ends lines that have begun
        self._wake = threading.Event()
        self._stopped = False
        self.on_leave: Callable[[], None] = lambda: None
        self.on_split: Callable[[], None] = lambda: None
        self.lost_leases: set[int] = set()
        self.splits: dict[int, int] = {}
        self._computing_since: float | None = None  # start of the current batch
        self._error: Exception | None = None  # why reporting ended
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def update(
        self,
        lease: int,
        records_done: int,
        version: int,
        loss: float | None = None,
        urgent: bool = False,
        event: pb.BatchEvent | None = None,
        seconds: float = 0.0,
        servers: int = 0,
    ) -> None:
        """Records progress for the next report; sends it at once if `urgent`.

        Args:
            servers: `MasterClient.newest_server` when the first batch of the progress began.
        """
        with self._lock:
            if event is not None:
                # Together with the version: the master assumes that all earlier batches are reported.
                if len(self._events) == _MAX_EVENTS:
                    logger.warning("The master accepts reports too slowly: its callbacks will miss batches")
                if len(self._events) <= _MAX_EVENTS:
                    self._events.append(event)
                urgent = urgent or len(self._events) == _EVENTS_PER_REPORT
            progress = self._progress
            progress.servers = min(progress.servers, servers) if progress.progressed else servers
            progress.lease, progress.records_done, progress.version = lease, records_done, version
            progress.progressed = True
            if loss is not None and np.isfinite(loss):
                progress.loss = (progress.loss * progress.batches + loss) / (progress.batches + 1)
                progress.batches += 1
            if seconds:
                progress.batch_seconds += seconds
                progress.timed_batches += 1
        if urgent:
            self._wake.set()

    @contextlib.contextmanager
    def computing(self, lease: int) -> Iterator[None]:
        """Marks that a batch of the leased task is being computed, which may take long without progress."""
        with self._lock:
            if self._progress.lease != lease:  # the first one
                self._progress.lease, self._progress.records_done = lease, 0
            self._computing_since = time.monotonic()
        try:
            yield
        finally:
            self._computing_since = None

    @property
    def servers(self) -> int:
        """As in `update`, of all progress that is not sent yet."""
        return self._progress.servers

    def clear(self) -> None:
        """No task runs now. When this returns, no report on the last one is being sent."""
        self.update(0, 0, self._progress.version, servers=self.servers)
        with self._sending:
            pass

    def warn(self, subject: str, text: str, errors: int = 0) -> None:
        """Records a warning for the user; `errors` of a subject add up until the next report."""
        with self._lock:
            warning = self._warnings.setdefault(subject, pb.CallbackWarning(subject=subject, text=text))
            warning.errors += errors

    def print(self, text: str, is_error: bool) -> None:
        """Records text that a hook printed."""
        with self._lock:
            self._printed.add(text, is_error)

    def log(self, record: str) -> None:
        """Records what a hook logged, as JSON."""
        with self._lock:
            self._printed.keep(record, is_record=True)

    def flush(self, with_text: bool = True) -> None:
        """Sends all recorded batch events and warnings, and printed text."""
        self._ends_lines = with_text
        while self._events or self._warnings or (with_text and self._printed):
            self.send()
        self._ends_lines = False
        with self._sending:  # waits for a report being sent by the other thread
            pass

    def send(self) -> None:
        """Sends everything recorded, now."""
        with self._sending:
            with self._lock:
                progress = pb.ReportProgressRequest()
                progress.CopyFrom(self._progress)
                self._progress.loss, self._progress.batches, self._progress.progressed = 0.0, 0, False
                self._progress.batch_seconds, self._progress.timed_batches = 0.0, 0
                since = self._computing_since
                progress.computing_seconds = 0.0 if since is None else time.monotonic() - since
                progress.batch_events.extend(self._events[:_EVENTS_PER_REPORT])
                del self._events[:_EVENTS_PER_REPORT]
                if self._events:  # the version would imply that they are reported
                    progress.version = progress.batch_events[-1].version
                progress.warnings.extend(self._warnings.values())
                self._warnings.clear()
                progress.printed.extend(self._printed.take(all_text=self._ends_lines))
            answer = self._client.report_progress(progress)
            if progress.lease and (answer.over or not answer.accepted):
                self.lost_leases.add(progress.lease)
            if answer.HasField("split"):
                self.splits[answer.split.lease] = answer.split.end
                self.on_split()
            if answer.leave:
                self.on_leave()

    def raise_error(self) -> None:
        """Raises the error that ended reporting, if any: the master refuses this process, or is lost."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._interval)
            self._wake.clear()
            try:
                self.send()
            except Exception as error:
                self._error = error
                return

    def stop(self) -> None:
        """Stops reporting; warnings and printed text of the last hooks are still sent."""
        self._stopped = True
        self._wake.set()
        self._thread.join()
        if self._error is None:
            with contextlib.suppress(ElasticCBError):
                self.flush()


class _PrintedText:
    """Text that hooks print, until it is sent: whole lines, in order, as a terminal shows them, and records that they
    log; more than a limit is left out.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[tuple[bool, bool], str]] = []  # whether of standard error, whether records
        self._begun = {False: "", True: ""}  # lines that have not ended, by stream
        self._size = 0
        self._left_out = 0  # lines

    def __bool__(self) -> bool:
        return bool(self._lines or self._left_out or any(self._begun.values()))

    def add(self, text: str, is_error: bool) -> None:
        """Text was printed."""
        *lines, begun = (self._begun[is_error] + readable(text)).split("\n")
        self._begun[is_error] = _shown(begun)
        for line in (_shown(each).removesuffix("\r") for each in lines):
            self.keep(line, is_error)

    def keep(self, line: str, is_error: bool = False, is_record: bool = False) -> None:
        """A line is complete, or a record was logged."""
        if self._size + len(line) > _MAX_CHARACTERS:
            self._left_out += 1
        else:
            self._lines.append(((is_error, is_record), f"{line}\n"))
            self._size += len(line) + 1

    def take(self, all_text: bool) -> list[pb.PrintedText]:
        """The lines to send now.

        Args:
            all_text: also lines that have not ended.
        """
        for is_error, begun in self._begun.items():
            if begun and (all_text or len(begun) > _MAX_CHARACTERS):
                self.add("\n", is_error)
        if self._left_out:
            what = how_many(self._left_out, "more line")
            text = f"({what} were printed or logged, faster than they could be shown; see the worker's log)\n"
            self._lines.append(((False, False), text))
        parts = itertools.groupby(self._lines, operator.itemgetter(0))
        texts = [
            pb.PrintedText(text="".join(line for _, line in part), is_error=kind[0], is_record=kind[1])
            for kind, part in parts
        ]
        self._lines, self._size, self._left_out = [], 0, 0
        return texts


def _shown(line: str) -> str:
    """What is left of a line that a program has overwritten from its beginning."""
    return line[line.rfind("\r", 0, len(line) - 1) + 1 :]
