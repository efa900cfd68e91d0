"""Warnings about callbacks that the user should see while the job continues."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallbackWarning:
    """A warning about a callback, shown once, even if several processes send it."""

    subject: str  # identifies duplicates: "Watch.on_test_end failed"
    text: str
    errors: int = 0  # errors of a hook after which the job continues
