"""Formats parts of messages."""

from __future__ import annotations


def how_many(number: int, thing: str) -> str:
    """Formats a number of things: 1 worker, 2,000 workers."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
