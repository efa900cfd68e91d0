"""A forked process that restarts as a new program: because it needs another Keras backend than its parent (a parameter
server, which needs TensorFlow, of a job whose workers use another framework), or because it has a GPU, and Keras on its
framework chooses the device when it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from elasticcb.process.import_path import python_code
from elasticcb.process.system import follow_file


def begin(watch: int, arguments: Sequence[str]) -> None:
    """Replaces the program of this process by an `elasticcb` command.

    Args:
        watch: a file that becomes readable when the process must end.
    """
    os.set_inheritable(watch, True)
    os.execv(sys.executable, [sys.executable, "-c", python_code(__name__), str(watch), *arguments])


def main() -> int:
    """The entry point of the new program."""
    follow_file(int(sys.argv.pop(1)))
    from elasticcb.cli.main import main as command_line

    return command_line(sys.argv[1:])
