"""What a user should hear about a callback while the job goes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallbackWarning:
    """Something about a callback, to be shown once, from whichever process it comes."""

    subject: str  # the same for what need not be shown twice: "Watch.on_test_end failed"
    text: str
    errors: int = 0  # errors of a hook that the job goes on after
