"""A process that `LocalCluster` has started, by any means."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticcb.process.import_path import python_code
from elasticcb.process.log_files import FILE_VARIABLE


@dataclass(frozen=True)
class Launch:
    """The specification of a process to start.

    Attributes:
        arguments: arguments of the `elasticcb` command.
        environment: its complete environment, except the variable of the log.
        log: file to which standard output and standard error are appended.
        own_path: don't pass on this process's import path, which belongs to another program (Ray).
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
    """How a process ended: `reason` as text; `failed`: with an error of its own.

    `code` is its exit code, or minus the signal that killed it; None: unknown.
    """

    reason: str
    failed: bool
    code: int | None = None

    @classmethod
    def of(cls, code: int) -> Ending:
        """Derived from an exit code; a negative one is the signal that killed the process."""
        return cls(f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}", code > 0, code)


class Child(Protocol):
    """One process."""

    @property
    def pid(self) -> int:
        """Waits until the process exists, if it is being started."""

    def poll(self) -> Ending | None:
        """How it ended; None while it runs."""

    def send_signal(self, number: int) -> None:
        """Does nothing if the process has ended."""

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ended within `seconds`."""


class SpawnedChild:
    """A process started as a new program, not forked."""

    def __init__(self, launch: Launch) -> None:
        with launch.log.open("ab") as log:
            self._process = subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=launch.full_environment,
                # In its own session, so that Ctrl-C reaches only the master, which then ends the others in order.
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
