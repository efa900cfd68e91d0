"""Removes the source files that TensorFlow writes to the temporary folder for each function that it traces."""

from __future__ import annotations

import contextlib
import os
import sys

from elasticcb.errors import GENERATED

_modules = 0  # at the last check


def remove_generated_files() -> None:
    """Removes the files that this process has read. TensorFlow does so only at a normal exit, but workers are killed at
    the end of a job. Costs nothing unless there are new modules."""
    global _modules
    if len(sys.modules) != _modules:
        _modules = len(sys.modules)
        # A copy is made at once; a list is not, and other threads import meanwhile.
        for name, module in sys.modules.copy().items():
            if name.startswith(GENERATED) and module.__file__ is not None:
                for path in (module.__file__, module.__cached__):  # the source and its compiled file
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                with contextlib.suppress(OSError):  # files of other processes are kept
                    os.rmdir(os.path.dirname(module.__cached__))
