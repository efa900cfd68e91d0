"""The interface that the master sees of whatever runs the processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from elasticcb.security.credentials import OPEN


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
        taken_away: others wanted its machine, or that is lost; no restart is used up.
    """

    role: str
    index: int
    pid: int
    reason: str
    failed: bool
    log: str = ""
    taken_away: bool = False


class ClusterBackend(ABC):
    """Starts and stops processes, and tells what it sees."""

    watches = True  # whether `poll` will tell of every process that ends
    access = OPEN  # to the job; processes get the token by ELASTICCB_JOB_TOKEN. Set it before the first `start`.
    separate = True  # whether these are processes of their own, which can be killed, or threads of this one

    def prepare(self) -> None:  # noqa: B027 -- there may be nothing to prepare
        """May be called some time before the first `start`, which is quicker then; `stop` must follow."""

    @property
    def host(self) -> str:
        """The address that the master is to listen on, for the processes to reach it; known after `prepare`."""
        return "127.0.0.1"

    @property
    def taken_over(self) -> Mapping[tuple[str, int], int | str]:
        """Processes that a master before this one has started, and that live, by role and place: the id of a process of
        this machine, or its `host_name` where no other has it."""
        return {}

    def end_taken_over(self) -> None:  # noqa: B027 -- most have none
        """Ends those."""

    @abstractmethod
    def start(self, role: str, index: int, master_address: str) -> None:
        """Has a process of `role` ("worker" or "ps") started that takes the place `index`."""

    @abstractmethod
    def poll(self) -> list[Exit]:
        """The processes that ended since the last call."""

    def pending(self) -> Mapping[tuple[str, int], str]:
        """Why processes that were asked for do not run yet, in words, by role and place."""
        return {}

    @abstractmethod
    def kill(self, role: str, index: int) -> None:
        """Ends a process at once, as one that hangs."""

    @abstractmethod
    def stop(self, grace_seconds: float) -> None:
        """Ends all processes, whose work nobody goes on with, within `grace_seconds`."""

    def note(self, text: str) -> None:  # noqa: B027 -- most have no such place
        """Keeps a line that the user was shown where others look for what befell a job."""

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        """The last lines that a process wrote; "" if they can't be had."""
        return ""
