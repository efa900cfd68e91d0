"""A process that `LocalCluster` has started, however that was done."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticcb.process.import_path import python_code
from elasticcb.process.logs import FILE_VARIABLE


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes:
        arguments: of the `elasticcb` command.
        environment: all of it, but for what names the log.
        log: file that standard output and standard error are appended to.
        own_path: it does not import from where this process does, which belongs to somebody else (Ray).
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    own_path: bool = False

    @property
    def full_environment(self) -> dict[str, str]:
        return self.environment | {FILE_VARIABLE: str(self.log.absolute())}

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", python_code("elasticcb.cli.main", self.own_path), *self.arguments]


@dataclass(frozen=True)
class Ending:
    """How a process ended: `reason` in words, `failed` by an error of its own.

    `code` is its exit code, or minus the signal that killed it; None when nobody knows.
    """

    reason: str
    failed: bool
    code: int | None = None

    @classmethod
    def of(cls, code: int) -> Ending:
        """From an exit code; a negative one is the signal that killed the process."""
        return cls(f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}", code > 0, code)


class Child(Protocol):
    """One process."""

    @property
    def pid(self) -> int:
        """Waits for the process to be there, if it is on its way."""

    def poll(self) -> Ending | None:
        """How it ended; None while it runs."""

    def send_signal(self, number: int) -> None:
        """Does nothing when it has ended."""

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ended within `seconds`."""


class SpawnedChild:
    """A process with a program of its own, started from nothing."""

    def __init__(self, launch: Launch) -> None:
        with launch.log.open("ab") as log:
            self._process = subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=launch.full_environment,
                # A session of its own: Ctrl-C reaches the master alone, which then ends the others in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Ending | None:
        code = self._process.poll()
        return None if code is None else Ending.of(code)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float | None = None) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None
