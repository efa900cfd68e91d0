"""The interface that the master sees of whatever runs the processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Exit:
    """A process that ended by itself.

    Attributes:
        role: "worker" or "ps".
        index: its place.
        pid: 0 when the backend has none.
        reason: in words: "exit code 1", "killed by SIGKILL".
        failed: by an error of its own; false after a normal end, and when a signal killed it.
        log: where its last words are, for messages; "" if nowhere.
    """

    role: str
    index: int
    pid: int
    reason: str
    failed: bool
    log: str = ""


class ClusterBackend(ABC):
    """Starts and stops processes, and tells what it sees."""

    watches = True  # whether `poll` will tell of every process that ends
    token = ""  # of the job; processes get it by ELASTICCB_JOB_TOKEN. Set it before the first `start`.
    separate = True  # whether these are processes of their own, which can be killed, or threads of this one

    def prepare(self) -> None:  # noqa: B027 -- there may be nothing to prepare
        """May be called some time before the first `start`, which is quicker then; `stop` must follow."""

    @abstractmethod
    def start(self, role: str, index: int, master_address: str) -> None:
        """Has a process of `role` ("worker" or "ps") started that takes the place `index`."""

    @abstractmethod
    def poll(self) -> list[Exit]:
        """The processes that ended since the last call."""

    @abstractmethod
    def kill(self, role: str, index: int) -> None:
        """Ends a process at once, as one that hangs."""

    @abstractmethod
    def stop(self, grace_seconds: float) -> None:
        """Ends all processes, whose work nobody goes on with, within `grace_seconds`."""

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        """The last lines that a process wrote; "" if they can't be had."""
        return ""
