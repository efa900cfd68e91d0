"""A forked process that has begun from nothing: because it needs Keras on another framework than what forked it, as a
parameter server, which needs TensorFlow, of a job whose workers compute with another one; or because it has a GPU, and
Keras on that framework chooses its device when it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from elasticcb.process.import_path import python_code
from elasticcb.process.parent import follow_file


def begin(watch: int, arguments: Sequence[str]) -> None:
    """Runs an `elasticcb` command in this process, in the place of what it runs.

    Args:
        watch: a file that becomes readable when the process is to end.
        arguments: of the command.
    """
    os.set_inheritable(watch, True)
    os.execv(sys.executable, [sys.executable, "-c", python_code(__name__), str(watch), *arguments])


def main() -> int:
    """What it begins with."""
    follow_file(int(sys.argv.pop(1)))
    from elasticcb.cli.main import main as command_line

    return command_line(sys.argv[1:])
