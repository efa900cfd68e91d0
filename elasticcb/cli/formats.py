"""Formats numbers for display."""

from __future__ import annotations

from collections.abc import Iterable


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
