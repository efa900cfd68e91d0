"""The name of this process in `ps`, `top` and `pgrep -f`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def show_as(name: str, job: str = "") -> None:
    """Names this process "elasticcb NAME of JOB", and briefly `name`, of which Linux keeps 15 characters (`ps -e`)."""
    os.environ.setdefault("SPT_NOENV", "1")  # what /proc tells of the environment stays
    from setproctitle import setproctitle

    setproctitle(f"elasticcb {name} of {job}" if job else f"elasticcb {name}")
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/comm").write_text(name)
