"""The source files that TensorFlow writes into the temporary folder for each function that it makes a graph of."""

from __future__ import annotations

import contextlib
import os
import sys

_PREFIX = "__autograph_generated_file"  # of their modules
_modules = 0  # that there were at the last look


def remove_generated_files() -> None:
    """Removes those that this process has read, which TensorFlow does only when a process ends by itself: workers are
    killed at the end of a job. Costs nothing while no module is new."""
    global _modules
    if len(sys.modules) != _modules:
        _modules = len(sys.modules)
        # A copy is made at once; a list is not, and other threads import meanwhile.
        for name, module in sys.modules.copy().items():
            if name.startswith(_PREFIX) and module.__file__ is not None:
                for path in (module.__file__, module.__cached__):  # the source, and what Python made of it
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                with contextlib.suppress(OSError):  # what others have in it stays
                    os.rmdir(os.path.dirname(module.__cached__))
