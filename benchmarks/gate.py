"""How the benchmark lets one contestant run at a time, and sees its steps, without slowing it down.

A contestant is a tree of processes. It trains forever; its training loop calls `Course.stepped` after every step (or
every few), which writes the time into a mapped file, and waits while the gate is closed. A closed gate is a lock on
a file: who waits for it takes no processor time, and a contestant whose benchmark has died is not held any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np

# Environment variables by which a process knows its course, and who has started it.
FOLDER_VARIABLE = "BENCHMARK_COURSE"
PARENT_VARIABLE = "BENCHMARK_PARENT"
_CAPACITY = 1 << 18  # stamps of a process; newer ones then take the place of the oldest
_CLOSED, _OPEN = b"\0", b"\1"


class Gate:
    """The benchmark's side of a contestant's course; open at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = (folder / "lock").open("w+b")
        flag = folder / "flag"
        flag.write_bytes(_OPEN)
        self._flag = mmap.mmap(os.open(flag, os.O_RDWR), 1)

    def open(self) -> None:
        self._flag[:] = _OPEN
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._flag[:] = _CLOSED

    def steps_by_process(self) -> list[int]:
        """Steps up to now, of each process that has made one."""
        return [int(_stamps(path)[1][0]) for path in self._files()]

    def steps_between(self, begin: float, end: float, workers: int) -> tuple[int, float]:
        """Steps of all processes in a span of time, and the seconds that they took.

        Workers that are in step with each other stamp together. So it counts from the middle of the first stamps, one
        for each worker, to the middle of the last ones; between single stamps, it would count too many.

        Args:
            begin, end: seconds of `time.monotonic`.
            workers: that run at the same time.

        Returns:
            Steps and seconds; (0, 0.0) when there are not enough stamps to tell.
        """
        found = []
        for path in self._files():
            times, header = _stamps(path)
            kept = np.array(times[: min(int(header[1]), _CAPACITY)])
            found.append(kept[(kept[:, 0] >= begin) & (kept[:, 0] <= end)])
        merged = np.concatenate(found) if found else np.zeros((0, 2))
        if len(merged) < 2 * workers:
            return 0, 0.0
        merged = merged[np.argsort(merged[:, 0])]
        return int(merged[workers:, 1].sum()), float(merged[-workers:, 0].mean() - merged[:workers, 0].mean())

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("stamps-*.ready"))


class Course:
    """The side of a process that makes steps. One per process, made where the steps are made."""

    def __init__(self) -> None:
        folder = Path(os.environ[FOLDER_VARIABLE])
        self._lock = (folder / "lock").open("r+b")
        self._flag = mmap.mmap(os.open(folder / "flag", os.O_RDONLY), 1, prot=mmap.PROT_READ)
        path = folder / f"stamps-{os.getpid()}"
        np.memmap(path, np.float64, "w+", shape=(_CAPACITY + 1, 2)).flush()
        ready = path.with_suffix(".ready")
        path.rename(ready)
        self._stamps, self._header = _stamps(ready)

    @property
    def closed(self) -> bool:
        return bool(self._flag[:] == _CLOSED)

    def stepped(self, steps: int = 1) -> None:
        """`steps` steps have ended just now. Waits while the gate is closed."""
        self.note(steps)
        self.wait()

    def note(self, steps: int) -> None:
        """`steps` steps have ended just now."""
        number = int(self._header[1])
        self._stamps[number % _CAPACITY] = time.monotonic(), steps
        self._header[0] += steps
        self._header[1] = number + 1

    def wait(self) -> None:
        """Returns when the gate is open."""
        while self.closed:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def _stamps(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Rows of (time, steps), and the header: steps and stamps up to now."""
    file = np.memmap(path, np.float64, "r+", shape=(_CAPACITY + 1, 2))
    return file[1:], file[0]


def end_with_parent() -> None:
    """Makes this process end when the one that started it does, even by SIGKILL."""
    parent = int(os.environ[PARENT_VARIABLE])  # os.getppid() is another process if it has ended

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
