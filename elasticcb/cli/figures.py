"""Formats numbers, the figures of a running job and of its epochs, and chooses those that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from elasticcb.master.snapshot import EpochEnd, JobSnapshot, format_metric, of_epochs
from elasticcb.settings import Command


def format_seconds(seconds: float) -> str:
    """0.4 -> "0.4 s", 75 -> "1:15", 3700 -> "1:01:40"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_step(seconds: float) -> str:
    """The time of one step, as in Keras's progress bar: 1.5 -> "1.5s/step", 0.0123 -> "12ms/step", 0.00035 ->
    "350us/step"."""
    if seconds >= 1:
        return f"{seconds:.1f}s/step"
    return f"{seconds * 1e3:.0f}ms/step" if seconds >= 1e-3 else f"{seconds * 1e6:.0f}us/step"


def format_count(count: int) -> str:
    """1234567 -> "1,234,567"."""
    return f"{count:,}"


def format_places(places: Iterable[int]) -> str:
    """(1, 3) -> "1, 3"."""
    return ", ".join(map(str, places))


GAP = 2  # spaces between two columns, or two parts of a line


class Figure(NamedTuple):
    """One figure.

    Attributes:
        rank: figures with a greater rank are dropped first if space is short.
        warns: the figure indicates a problem.
    """

    label: str
    value: str
    rank: int
    warns: bool = False

    @property
    def text(self) -> str:
        """As a part of a line."""
        return f"{self.value} {self.label}" if self.label in _UNITS else f"{self.label} {self.value}"

    @property
    def width(self) -> int:
        """As a column, its label above its value."""
        return max(len(self.label), len(self.value))


_UNITS = frozenset({"records/s"})  # written after the value
_EPOCH_RANKS = {"loss": 1, "val_loss": 2}  # of the figures at the end of an epoch; other metrics follow


def figures_of(status: JobSnapshot) -> list[Figure]:
    """The known figures of `status`, except progress."""
    found = []
    if status.records_per_second:
        found.append(Figure("records/s", format_count(round(status.records_per_second)), 2))
    if status.stream:
        behind = f"{format_count(status.lag_records)} records"
        behind += f", {format_seconds(status.lag_seconds)}" if status.lag_seconds else ""
        found.append(Figure("lag", behind, 2))
    if status.version:
        found.append(Figure("version", format_count(status.version), 6))
    if status.loss is not None:
        found.append(Figure("loss", format_metric(status.loss), 0))
    # Keras's names, to distinguish the two losses.
    metrics = enumerate(status.metrics.items())
    found += [Figure(f"val_{name}", format_metric(value), 3 if at < 2 else 7 + at) for at, (name, value) in metrics]
    workers, servers = status.workers, status.servers
    slow = f" (slow: {format_places(status.stragglers)})" if status.stragglers else ""
    missing = workers.up < workers.planned
    if workers.planned:
        found.append(Figure("workers", f"{workers.up}/{workers.planned}{slow}", 1, missing or bool(slow)))
    if servers.planned:
        found.append(Figure("servers", f"{servers.up}/{servers.planned}", 4, servers.up < servers.planned))
    todo, doing = status.tasks_by_state["todo"], status.tasks_by_state["doing"]
    if todo or doing:
        found.append(Figure("tasks", f"{format_count(todo)} to do, {doing} running", 5))
    return found


def share_done(status: JobSnapshot) -> float | None:
    """Share of the job that is done, from 0 to 1; None if unknown."""
    if status.records_total:
        return min(1.0, status.records_trained / status.records_total)
    if status.command in (Command.EVALUATE, Command.PREDICT):
        tasks = sum(status.tasks.values())
        return status.tasks_by_state["done"] / tasks if tasks else None
    return None


def status_parts(status: JobSnapshot) -> list[str]:
    """The known figures of `status` as parts of a line."""
    parts = []
    if status.epoch:
        parts.append(f"epoch {of_epochs(status.epoch, status.epochs)}")
    if status.records_total:
        done, total = format_count(status.records_trained), format_count(status.records_total)
        parts.append(f"{share_done(status):.0%} ({done}/{total} records)")
    parts += [figure.text for figure in figures_of(status)]
    if status.seconds_left is not None:
        parts.append(f"{format_seconds(status.seconds_left)} left")
    return parts


def epoch_line(end: EpochEnd, width: int | None = None) -> str:
    """ "Epoch 2/4  12.3s  31ms/step  loss 0.6550", cut to what fits in `width` characters.

    Times are columns, so that the lines of epochs align; empty if there is no time.
    """
    epoch = of_epochs(end.epoch, end.epochs)
    if end.epochs:
        epoch = epoch.rjust(2 * len(str(end.epochs)) + 1)
    seconds = format_seconds(end.seconds).replace(" ", "") if end.steps else ""
    step = format_step(end.seconds / end.steps) if end.steps else ""
    parts = [(f"Epoch {epoch}", 0), (f"{seconds:>5}", 4), (f"{step:>9}", 6)]
    for name, value in end.logs.items():
        rank = _EPOCH_RANKS.get(name, 3 if name.startswith("val_") else 5)
        parts.append((f"{name} {format_metric(value)}", rank))
    if width is not None:
        kept = fitting([len(text) for text, _ in parts], [rank for _, rank in parts], width)
        parts = [parts[at] for at in kept]
    return (" " * GAP).join(text for text, _ in parts).rstrip()


def fitting(widths: Sequence[int], ranks: Sequence[int], room: int) -> list[int]:
    """Positions of the columns that fit next to each other, chosen by rank, smallest first."""
    kept: list[int] = []
    for at in sorted(range(len(widths)), key=lambda at: ranks[at]):
        if sum(widths[other] + GAP for other in kept) + widths[at] <= room:
            kept.append(at)
    return sorted(kept)
