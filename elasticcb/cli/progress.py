"""How a running job is shown: live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elasticcb.cli.summary import format_count, format_metric, format_places, format_seconds, summary_lines
from elasticcb.cluster.registry import backend_of
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.process.logs import may_reach_nobody, print_line
from elasticcb.settings import JobSettings

_REFRESHES_PER_SECOND = 4


class Display(Protocol):
    """What the master tells a person. Any thread may call it, as often as it likes."""

    def update(self, status: JobSnapshot) -> None:
        """The job looks like this now."""

    def message(self, text: str) -> None:
        """Something happened that a person should know: a worker was lost, a checkpoint was written."""

    def finish(self, summary: JobSnapshot) -> None:
        """The job is over and did what it should. A job that failed ends without this."""

    def close(self) -> None:
        """Gives the terminal back; may be called more than once, and without `finish`."""


def make_display(settings: JobSettings) -> Display:
    """The live display on a terminal, plain lines elsewhere.

    A job in one process gets plain lines too: a display that redraws itself would write over a debugger.
    """
    if sys.stdout.isatty() and backend_of(settings.cluster.kind).separate:
        return LiveDisplay(settings.name)
    return PlainDisplay(settings.name)


def status_parts(status: JobSnapshot) -> list[str]:
    """The figures of `status`, the ones that are not known left out."""
    parts = []
    if status.epochs:
        parts.append(f"epoch {status.epoch}/{status.epochs}")
    if status.records_total:
        share = min(1.0, status.records_trained / status.records_total)
        done, total = format_count(status.records_trained), format_count(status.records_total)
        parts.append(f"{share:.0%} ({done}/{total} records)")
    if status.records_per_second:
        parts.append(f"{format_count(round(status.records_per_second))} records/s")
    if status.version:
        parts.append(f"version {format_count(status.version)}")
    if status.loss is not None:
        parts.append(f"loss {format_metric(status.loss)}")
    # Named as Keras names them, so that the two losses can be told apart.
    parts += [f"val_{name} {format_metric(value)}" for name, value in status.metrics.items()]
    slow = f" (slow: {format_places(status.stragglers)})" if status.stragglers else ""
    parts.append(f"workers {status.workers.up}/{status.workers.planned}{slow}")
    parts.append(f"servers {status.servers.up}/{status.servers.planned}")
    todo, doing = status.tasks_by_state["todo"], status.tasks_by_state["doing"]
    if todo or doing:
        parts.append(f"tasks {format_count(todo)} to do, {doing} running")
    if status.seconds_left is not None:
        parts.append(f"{format_seconds(status.seconds_left)} left")
    return parts


class PlainDisplay:
    """Plain lines, or JSON as those of logs: one when something changed, and no more than one in `interval` seconds.

    Args:
        name: of the job.
        stream: None takes standard output.
        interval: seconds between two lines; a new phase is told at once.
        clock: gives seconds.
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
            self._write(f"[{self._name}] {text}")

    def finish(self, summary: JobSnapshot) -> None:
        with self._lock:
            self._write("\n" + "\n".join(summary_lines(summary)))

    def close(self) -> None:
        pass

    def _write(self, text: str) -> None:
        print_line(text, self._stream)


class LiveDisplay:
    """A few lines at the bottom of a terminal that are always up to date; messages scroll by above.

    Args:
        name: of the job.
        console: None takes standard output.
    """

    def __init__(self, name: str, console: Console | None = None) -> None:
        self._name = name
        self._status: JobSnapshot | None = None
        self._lock = threading.Lock()
        self._closed = False
        # Without highlighting: rich would colour every number in a user's text.
        self._console = Console(highlight=False) if console is None else console
        self._live = Live(
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            get_renderable=self._render,
            redirect_stderr=False,  # stderr is where errors go, after `close`
            transient=True,
        )

    def update(self, status: JobSnapshot) -> None:
        with self._lock, may_reach_nobody(self._console.file):
            self._status = status
            if not self._closed:
                self._live.start()  # does nothing when it has started

    def message(self, text: str) -> None:
        with may_reach_nobody(self._console.file):
            self._console.print(Text(text))

    def finish(self, summary: JobSnapshot) -> None:
        self.close()
        # Not through rich: it would break long paths, which people copy.
        with may_reach_nobody(self._console.file):
            print("\n".join(summary_lines(summary)), file=self._console.file, flush=True)

    def close(self) -> None:
        with self._lock, may_reach_nobody(self._console.file):
            self._closed = True
            self._live.stop()

    def _render(self) -> RenderableType:
        status = self._status
        if status is None:
            return Text(self._name)
        bar = Table.grid(padding=(0, 1))
        share = Text(f"{min(1.0, status.records_trained / status.records_total):4.0%}") if status.records_total else ""
        bar.add_row(
            Text(self._name, style="bold"),
            Text(status.phase, style="cyan"),
            # Without a total the bar only shows that something moves.
            ProgressBar(
                total=status.records_total or None,
                completed=status.records_trained,
                width=30,
                pulse=not status.records_total,
            ),
            share,
        )
        return Group(bar, Text("   ".join(status_parts(status))))
