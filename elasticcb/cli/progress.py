"""Shows a running job: live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console, ConsoleRenderable, Group, RenderableType, RenderHook
from rich.control import Control
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment, Segments
from rich.spinner import Spinner
from rich.status import Status
from rich.table import Table
from rich.text import Text

from elasticcb.cli.figures import GAP, Figure, epoch_line, figures_of, fitting, share_done, status_parts
from elasticcb.cli.formats import format_seconds
from elasticcb.cli.summary import summary_lines
from elasticcb.cluster.registry import backend_of
from elasticcb.dashboard.beside import line_about, published_address
from elasticcb.master.snapshot import EpochEnd, JobSnapshot
from elasticcb.process.logs import may_reach_nobody, print_line
from elasticcb.settings import JobSettings

_REFRESHES_PER_SECOND = 4
_BAR_WIDTHS = 8, 40  # width of the bar, at least and at most
_MARGIN = 2  # width of the spinner, in front
_ACCENT, _LABEL, _WARNING = "cyan", "dim", "yellow"  # styles


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
    spinner = Status("[bold]starting", console=Console(highlight=False), spinner_style=_ACCENT)
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


class _Reflow(RenderHook):
    """Erases all rows of the grid, also if the terminal became narrower and wrapped its lines.

    Attributes:
        widths: widths of the lines that are drawn next.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.widths: list[int] = []
        self._drawn: list[int] = []

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Runs after the hook of `Live`, whose first control erases one row per line."""
        more = sum((width - 1) // self._console.width for width in self._drawn if width)
        self._drawn = self.widths
        if not more:
            return renderables
        erase = Control(*((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * more)
        return [renderables[0], erase, *renderables[1:]]


class LiveDisplay:
    """A live grid of a few lines at the bottom of a terminal; permanent lines scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._status = JobSnapshot()
        self._lock = threading.Lock()
        self._closed = False
        self._spinner = Spinner("dots", style=_ACCENT)
        # Without highlighting: rich would colour every number in a user's text.
        self._console = Console(highlight=False) if console is None else console
        self._reflow = _Reflow(self._console)
        self._live = Live(
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            get_renderable=self._render,
            redirect_stderr=False,  # errors go to stderr, after `close`
            transient=True,
        )

    def update(self, status: JobSnapshot) -> None:
        with self._lock, may_reach_nobody(self._console.file):
            self._status = status
            if not (self._closed or self._live.is_started):
                self._live.start()
                self._console.push_render_hook(self._reflow)
                self._live.refresh()

    def message(self, text: str) -> None:
        with may_reach_nobody(self._console.file):
            self._console.print(Text(text), soft_wrap=True)  # rich would break long paths, which people copy

    def evaluated(self, text: str, of_epoch: bool) -> None:
        if not of_epoch:
            self.message(text)

    def epoch_ended(self, end: EpochEnd) -> None:
        self.message(epoch_line(end, self._console.width))

    def finish(self, summary: JobSnapshot) -> None:
        self.close()
        # Not through rich: it would break long paths.
        with may_reach_nobody(self._console.file):
            print("\n" + "\n".join(summary_lines(summary)), file=self._console.file, flush=True)

    def close(self) -> None:
        with self._lock, may_reach_nobody(self._console.file):
            self._closed = True
            if self._live.is_started:
                self._console.pop_render_hook()
                self._live.stop()

    def _render(self) -> RenderableType:
        # A terminal may wrap a line that is exactly as wide as it is.
        room = self._console.width - 1
        shown = Group(self._progress(self._status, room), _grid(figures_of(self._status), room - _MARGIN))
        lines = self._console.render_lines(shown, pad=False)
        self._reflow.widths = [Segment.get_line_length(line) for line in lines]
        return Segments([segment for line in lines for segment in (*line, Segment.line())])

    def _progress(self, status: JobSnapshot, room: int) -> RenderableType:
        """The phase and the progress."""
        share = share_done(status)
        left = "" if status.seconds_left is None else f"{format_seconds(status.seconds_left)} left"
        parts = [
            (Text(status.phase, style="bold"), 0),
            (Text(f"epoch {status.epoch}/{status.epochs}" if status.epoch else ""), 1),
            (Text("" if share is None else f"{share:4.0%}"), 2),
            (Text(left), 3),
        ]
        parts = [(text, rank) for text, rank in parts if text.plain]
        kept = fitting([text.cell_len for text, _ in parts], [rank for _, rank in parts], room - _MARGIN)
        row: list[RenderableType] = [parts[at][0] for at in kept]
        least, most = _BAR_WIDTHS
        bar = room - _MARGIN - sum(parts[at][0].cell_len + GAP for at in kept)
        if bar >= least and status.ready:
            # Without a total, the bar only pulses.
            row.insert(
                2 if status.epoch else 1,
                ProgressBar(
                    total=1.0 if share is not None else None,
                    completed=share or 0.0,
                    width=min(bar, most),
                    pulse=share is None,
                    style=_LABEL,
                    complete_style=_ACCENT,
                    finished_style=_ACCENT,
                    pulse_style=_ACCENT,
                ),
            )
        line = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        for _ in row:
            line.add_column(no_wrap=True)
        line.add_row(*row)
        whole = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        whole.add_row(self._spinner, line)
        return whole


def _grid(figures: list[Figure], room: int) -> RenderableType:
    """Labels above values, in as many columns as fit."""
    kept = fitting([figure.width for figure in figures], [figure.rank for figure in figures], room)
    shown = [figures[at] for at in kept]
    if not shown:
        return Text("")
    grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    for _ in shown:
        grid.add_column(no_wrap=True)
    grid.add_row(*(Text(figure.label, style=_LABEL) for figure in shown))
    grid.add_row(*(Text(figure.value, style=_WARNING if figure.warns else "") for figure in shown))
    return Padding(grid, (0, 0, 0, _MARGIN), expand=False)
