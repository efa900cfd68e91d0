"""A process and all that it has started: processor time, memory, and its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


class ProcessTree:
    """A Python program of its own session, whose processes are counted together.

    Args:
        command: arguments of the Python interpreter.
        environment: added to this process's own.
        log: file that takes what it prints.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self._root = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches only the benchmark, which then ends its trees
            )

    @property
    def ended(self) -> bool:
        return self._root.poll() is not None

    def cpu_seconds(self) -> float:
        """User and system time of all processes that run."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_bytes(self) -> int:
        """Proportional set size: pages that n processes share count 1/n for each."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
        return total

    def names(self) -> list[tuple[str, int]]:
        """Of each process its name, such as "worker-0", and its id, for profilers."""
        found = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                found.append((process.name(), process.pid))
        return found

    def end(self) -> None:
        """Ends all processes, at once: nothing that they hold is needed."""
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        self._root.wait()

    def _processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._root.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []
