"""The name of this process in `ps -e` and `top`."""

from __future__ import annotations

import contextlib
from pathlib import Path


def show_as(name: str) -> None:
    """Names this process `name`, of which Linux keeps 15 characters; does nothing on other systems."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
