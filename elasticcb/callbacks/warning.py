"""Warnings that the user should see while the job continues: about callbacks, and of Python's `warnings`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from elasticcb.errors import is_users_own


@dataclass(frozen=True)
class CallbackWarning:
    """A warning about a callback, shown once, even if several processes send it."""

    subject: str  # identifies duplicates: "Watch.on_test_end failed"
    text: str
    errors: int = 0  # errors of a hook after which the job continues


@contextlib.contextmanager
def shown(who: str, warn: Callable[[CallbackWarning], None], of_libraries: bool = True) -> Iterator[None]:
    """Shows the user what Python's `warnings` report meanwhile, which a command only logs. (A program shows it itself.)
    Python skips what it has reported before.

    Args:
        of_libraries: whether code of other libraries than Keras counts.
    """
    log = warnings.showwarning

    def show_as_well(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        log(message, category, filename, lineno, file, line)
        if not of_libraries and not is_users_own(filename) and "keras" not in Path(filename).parts:
            return
        text = f"{who} warns: {message}"
        warn(CallbackWarning(text, text))

    warnings.showwarning = show_as_well
    try:
        yield
    finally:
        warnings.showwarning = log
