"""Shows a running job: live on a terminal, as plain lines elsewhere; and its summary at the end."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
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

from elasticcb.cli.figures import (
    GAP,
    Figure,
    epoch_line,
    figures_of,
    fitting,
    format_count,
    format_places,
    format_seconds,
    share_done,
    status_parts,
)
from elasticcb.cluster.registry import backend_of
from elasticcb.master.snapshot import EpochEnd, JobSnapshot, ProcessCounts, SavedModelInput, format_metric, of_epochs
from elasticcb.process.log_files import may_reach_nobody, print_line
from elasticcb.settings import Command, JobSettings

_LINES_SECONDS = 10.0  # between two plain lines, at least
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
    """The live display on a terminal, plain lines elsewhere."""
    if not redraws(settings):
        return PlainDisplay(settings.name)
    display = LiveDisplay()
    display.update(JobSnapshot())
    return display


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
    """Plain lines, or JSON lines as in logs: one when the status changed, at most one in `_LINES_SECONDS`.

    Shown at once: a phase that the job is in for the first time, and that all processes are there, and no others, also
    when their planned number has changed.
    """

    def __init__(self, name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._lock = threading.Lock()
        self._phases, self._shown = set[str](), ""
        self._complete: tuple[int, ...] = ()
        self._shown_at = 0.0

    def update(self, status: JobSnapshot) -> None:
        now = self._clock()
        with self._lock:
            text = ", ".join(status_parts(status))
            processes = (status.workers, status.servers)
            complete = tuple(each.up for each in processes if each.up == each.planned)
            at_once = status.phase not in self._phases or (len(complete) == 2 and complete != self._complete)
            self._complete = complete
            if not at_once and (text == self._shown or now - self._shown_at < _LINES_SECONDS):
                return
            self._phases.add(status.phase)
            self._shown, self._shown_at = text, now
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
            (Text(f"epoch {of_epochs(status.epoch, status.epochs)}" if status.epoch else ""), 1),
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


_LABEL_WIDTH = 34  # width of the accounting's first column, in characters
_MOST_RUNS = 6  # groups of epochs with equally many records to list


def summary_lines(summary: JobSnapshot) -> list[str]:
    """The summary as lines of text: results, accounting, then faults if there were any."""
    verb = {Command.TRAIN: "Training", Command.EVALUATE: "Evaluation", Command.PREDICT: "Prediction"}
    assert summary.command is not None
    lines = [f"{verb[summary.command]} is done, in {format_seconds(summary.seconds)}."]
    if summary.stopped_early:
        lines.append(f"It ended early: {summary.stopped_early}")
    if summary.metrics:
        what = "Metrics" if summary.command is Command.EVALUATE else "Metrics of the last evaluation"
        lines += ["", f"{what}:"]
        width = max(map(len, summary.metrics)) + 2
        lines += [f"  {name:<{width}}{format_metric(value)}" for name, value in summary.metrics.items()]
    if summary.saved_model_path:
        lines += ["", *_saved_model(summary)]
    if summary.predictions_path:
        lines += ["", f"Predictions, one row per record in the order of the data: {summary.predictions_path}"]
    if summary.checkpoint_path:
        lines += ["", f"The model, as a checkpoint: {summary.checkpoint_path}"]
        if not summary.saved_model_path:
            job = shlex.quote(summary.directory)
            lines.append(f"Export it with: elasticcb export {job} --output=FOLDER")
    if summary.export_path:
        lines += ["", f"Exports for serving, up to version {summary.export_version}: {summary.export_path}"]
        lines.append(f"Serve the newest with: elasticcb serve {shlex.quote(summary.export_path)}")
    for part in (_accounting(summary), _faults(summary)):
        rows = [f"  {label:<{_LABEL_WIDTH}}{value}" for label, value in part]
        lines += ["", *rows] if rows else []
    if summary.directory:
        lines += ["", f"Logs: {summary.directory}/logs"]
    return lines


def _accounting(summary: JobSnapshot) -> Iterator[tuple[str, str]]:
    if summary.command is Command.TRAIN:
        yield "records trained", f"{format_count(summary.records_trained)}{_by_epoch(summary.records_per_epoch)}"
    if summary.command is not Command.PREDICT and (summary.records_evaluated or summary.metrics):
        yield "records evaluated, once each", format_count(summary.records_evaluated)
    if summary.command is Command.PREDICT:
        yield "records predicted", format_count(summary.records_predicted)
    yield "model version", format_count(summary.version)
    if summary.seconds_to_first_step is not None:
        yield "time to the first training step", format_seconds(summary.seconds_to_first_step)
    if summary.tasks_split:
        yield "tasks split for idle workers", format_count(summary.tasks_split)


def _by_epoch(records: Sequence[int]) -> str:
    """The number of records of each epoch, equal ones together: " (3 epochs of 120, 1 of 96)"."""
    runs = [(len(list(run)), count) for count, run in groupby(records)]
    if len(runs) > _MOST_RUNS:
        return f" ({len(records)} epochs of {format_count(min(records))} to {format_count(max(records))})"
    parts = [f"{epochs} of {format_count(count)}" for epochs, count in runs]
    if parts:
        parts[0] = parts[0].replace(" of", " epoch of" if runs[0][0] == 1 else " epochs of")
    return f" ({', '.join(parts)})" if parts else ""


# Faults that a successful job may have had: the field of the snapshot by label. A count of 0 is not shown.
FAULTS: Mapping[str, str] = {
    "workers lost": "workers.lost",
    "parameter servers lost": "servers.lost",
    "updates lost with them": "updates_lost",
    "task retries": "tasks_retried",
    "duplicate records (at most)": "records_repeated",
    "records removed before training": "records_lost",
    "bad records skipped": "bad_records",
    "batches skipped (NaN or infinity)": "batches_skipped",
    "checkpoints not written": "checkpoints_failed",
    "recovery files not written": "recovery_files_failed",
    "errors in callbacks": "callback_errors",
}


def _faults(summary: JobSnapshot) -> Iterator[tuple[str, str]]:
    for label, field in FAULTS.items():
        count = attrgetter(field)(summary)
        if not count:
            continue
        if label == "workers lost":
            yield label, _lost(summary.workers)
        elif label == "parameter servers lost":
            slowest = f", the slowest in {format_seconds(summary.longest_recovery_seconds)}"
            yield label, _lost(summary.servers, slowest if summary.servers.replaced else "")
        else:
            yield label, format_count(count)
    if summary.refused_calls:
        counts = (f"{format_count(count)} {reason}" for reason, count in summary.refused_calls.items())
        yield "calls refused", ", ".join(counts)
    if summary.stragglers_ever:
        yield "slow workers (stragglers)", format_places(summary.stragglers_ever)


def _lost(counts: ProcessCounts, details: str = "") -> str:
    return f"{format_count(counts.lost)} ({format_count(counts.replaced)} replaced{details})"


def _saved_model(summary: JobSnapshot) -> Iterator[str]:
    path = summary.saved_model_path
    yield f"SavedModel: {path}"
    yield "Use it from Python, with only TensorFlow:"
    yield "  import tensorflow as tf"
    yield f"  model = tf.saved_model.load({path!r})"
    if summary.saved_model_inputs:
        yield f'  print(model.signatures["serving_default"]({_arguments(summary.saved_model_inputs)}))'
    else:
        yield '  print(model.signatures["serving_default"].structured_input_signature)'
    yield "See its inputs and outputs:"
    yield f"  saved_model_cli show --dir {shlex.quote(path)} --tag_set serve --signature_def serving_default"


def _arguments(inputs: tuple[SavedModelInput, ...]) -> str:
    """Example inputs: one record of zeros."""
    values = {
        entry.name: f"tf.zeros({[1 if size is None else size for size in entry.shape]}, {entry.dtype!r})"
        for entry in inputs
    }
    if all(name.isidentifier() for name in values):
        return ", ".join(f"{name}={value}" for name, value in values.items())
    return "**{" + ", ".join(f"{name!r}: {value}" for name, value in values.items()) + "}"
