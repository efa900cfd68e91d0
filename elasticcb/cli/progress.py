"""Shows a running job: live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console
from rich.status import Status

from elasticcb.cli.figures import epoch_line, status_parts
from elasticcb.cli.live_display import ACCENT, LiveDisplay
from elasticcb.cli.summary import summary_lines
from elasticcb.cluster.registry import backend_of
from elasticcb.dashboard.beside import line_about, published_address
from elasticcb.master.snapshot import EpochEnd, JobSnapshot
from elasticcb.process.logs import print_line
from elasticcb.settings import JobSettings


class Display(Protocol):
    """Receives what the master shows to users. Any thread may call it at any time."""

    def update(self, status: JobSnapshot) -> None:
        """The current status of the job."""

    def message(self, text: str) -> None:
        """An event for the user: a worker was lost, a checkpoint was written."""

    def evaluated(self, text: str, of_epoch: bool) -> None:
        """The result of an evaluation pass; `of_epoch`: the end of its epoch will show the same figures."""

    def epoch_ended(self, end: EpochEnd) -> None:
        """An epoch was trained, and evaluated if requested."""

    def finish(self, summary: JobSnapshot) -> None:
        """The job succeeded. A failed job ends without this call."""

    def close(self) -> None:
        """Releases the terminal; may be called more than once, and without `finish`."""


def make_display(settings: JobSettings) -> Display:
    """The live display on a terminal, plain lines elsewhere; shows the address of the dashboard, if there is one."""
    display: Display
    if redraws(settings):
        display = LiveDisplay()
        display.update(JobSnapshot())
    else:
        display = PlainDisplay(settings.name)
    return DisplayWithPage(display, settings.directory) if settings.cluster.dashboard else display


def start_spinner(settings: JobSettings) -> Status:
    """Shows on a terminal that a job is starting, until stopped: importing the master takes seconds."""
    spinner = Status("[bold]starting", console=Console(highlight=False), spinner_style=ACCENT)
    if redraws(settings):
        spinner.start()
    return spinner


def redraws(settings: JobSettings) -> bool:
    """Whether to use a live display, which overwrites lines.

    Not if the terminal can't, and not for a job in one process, where it would overwrite a debugger's prompt.
    """
    return sys.stdout.isatty() and not Console().is_dumb_terminal and backend_of(settings.cluster.kind).separate


class PlainDisplay:
    """Plain lines, or JSON lines as in logs: one when the status changed, at most one per `interval` seconds.

    Args:
        interval: seconds between two lines; a new phase is shown at once.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None = None,
        interval: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._stream = sys.stdout if stream is None else stream
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._phase, self._shown = "", ""
        self._shown_at = 0.0

    def update(self, status: JobSnapshot) -> None:
        now = self._clock()
        with self._lock:
            text = ", ".join(status_parts(status))
            if status.phase == self._phase and (text == self._shown or now - self._shown_at < self._interval):
                return
            self._phase, self._shown, self._shown_at = status.phase, text, now
            self._write(f"[{self._name}] {status.phase}: {text}")

    def message(self, text: str) -> None:
        with self._lock:
            self._write("\n".join(f"[{self._name}] {line}" for line in text.split("\n")))

    def evaluated(self, text: str, of_epoch: bool) -> None:
        self.message(text)

    def epoch_ended(self, end: EpochEnd) -> None:
        self.message(epoch_line(end))

    def finish(self, summary: JobSnapshot) -> None:
        with self._lock:
            self._write("\n" + "\n".join(summary_lines(summary)))

    def close(self) -> None:
        pass

    def _write(self, text: str) -> None:
        print_line(text, self._stream)


class DisplayWithPage:
    """A display that also shows the address of the dashboard once it is served."""

    def __init__(self, display: Display, folder: str) -> None:
        self._display, self._folder = display, folder
        self._told = False
        self.message, self.evaluated, self.epoch_ended = display.message, display.evaluated, display.epoch_ended
        self.finish, self.close = display.finish, display.close

    def update(self, status: JobSnapshot) -> None:
        if not self._told and (address := published_address(self._folder)):
            self._told = True
            self._display.message(line_about(address))
        self._display.update(status)
