"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Fails when `condition` does not hold within `seconds`."""
    give_up, pause = time.monotonic() + seconds, 0.01
    while not condition():
        assert time.monotonic() < give_up, f"{condition} did not hold within {seconds:g} s"
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
