"""Where the processes of a job import from: the same folders in the same order as the process that starts them.

`python -m` puts the current folder first, where any `random.py` or `elasticcb/` hides the real one. The `elasticcb`
command does not, so that the processes of a job must not be started by `-m`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

# For a machine other than this one: the path that its Python has by itself, without the current folder.
_OWN_PATH = "[folder for folder in sys.path if folder]"


def python_code(module: str, own_path: bool = False) -> str:
    """A program for `python -c` that calls `main()` of a module of this package.

    Args:
        own_path: it has the import path of the Python that runs it, instead of that of this process.
    """
    path = _OWN_PATH if own_path else repr([folder for folder in sys.path if isinstance(folder, str)])
    return f"import sys; sys.path[:] = {path}; from {module} import main; sys.exit(main())"


def leave_out_current_folder() -> None:
    """Takes off the import path what `python -m elasticcb` has put there; call it before anything else is imported."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Where elasticcb is not installed, it is found by that alone.
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] != package:
        del sys.path[0]


def caller_path() -> list[str]:
    """The import path of this process, for `adopt_path` in others."""
    return [_absolute(folder) for folder in sys.path if isinstance(folder, str)]


def adopt_path(folders: Iterable[str]) -> None:
    """Adds folders of another process's import path that this one lacks: first those that stand first there, as the
    folder of a script does. On another machine, whose own folders may be elsewhere, those stay where they are."""
    own = caller_path()
    first: list[str] = []
    last: list[str] = []
    missing = first
    for folder in folders:
        if folder in own:
            missing = last
        else:
            missing.append(folder)
    sys.path[:] = [*first, *sys.path, *last]


def _absolute(folder: str) -> str:
    # Some entries are no folders, but names for a finder of an editable installation.
    return os.path.abspath(folder) if not folder or os.path.exists(folder) else folder
