"""Runs the engines that build and push container images."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from elasticcb.cli.image.engine import ENGINES, NOT_INSTALLED, Engine, EngineState, problem_of, usable

_PROBE_SECONDS = 30.0
_KEPT_LINES = 30  # last lines of an engine's output, which explain a failure


@dataclass(frozen=True)
class EngineOutcome:
    """The exit code of an engine's command, and the end of its output."""

    code: int
    lines: Sequence[str]


def engines(named: str = "") -> list[Engine]:
    """The engines that work here, or the one with that name.

    Raises:
        UsageError: there is none; the message says why.
    """
    return usable([EngineState(engine, _problem(engine)) for engine in ENGINES if named in ("", engine.name)])


def succeeds(command: Sequence[str]) -> bool:
    return _run(command)[0] == 0


def said(command: Sequence[str]) -> str:
    """The first line that a command prints; "" if it fails."""
    code, output = _run(command)
    return output.partition("\n")[0].strip() if code == 0 else ""


def show(command: Sequence[str]) -> EngineOutcome:
    """Runs a command, and shows its output as it is written."""
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # nobody can answer a prompt
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last.append(line.rstrip())
            if last and not line.endswith("\n"):
                print()
        except BaseException:
            process.terminate()
            raise
    return EngineOutcome(process.returncode, list(last))


def _problem(engine: Engine) -> str:
    code, output = _run([engine.name, *engine.probe])
    return "" if code == 0 else NOT_INSTALLED if code is None else problem_of(engine, output)


def _run(command: Sequence[str]) -> tuple[int | None, str]:
    """The exit code and the output; None if the command does not exist."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except PermissionError as error:
        return 126, f"it can't be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, f"it did not answer within {_PROBE_SECONDS:g} s"
    return done.returncode, done.stdout
