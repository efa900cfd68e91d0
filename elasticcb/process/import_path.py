"""Where the processes of a job import from: the same folders in the same order as the process that starts them.

`python -m` puts the current folder first, where any `random.py` or `elasticcb/` hides the real one. The `elasticcb`
command does not, so that the processes of a job must not be started by `-m`.

The folder of a script stands first, too, where Python runs it. A process of a job imports more than the script does,
such as click: a file of the user's of that name must not take its place. So a process begins with the import path that
its Python has by itself, followed by the other folders of the caller, and takes the caller's order when it has imported
all that it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

# For a machine other than this one: the path that its Python has by itself, without the current folder.
_OWN_PATH = "[folder for folder in sys.path if folder]"


_callers: list[str] | None = None  # until this process has it


def python_code(module: str, own_path: bool = False) -> str:
    """A program for `python -c` that calls `main()` of a module of this package.

    Args:
        own_path: it has the import path of the Python that runs it. Without it, it has that of this process from
            `follow_caller` on.
    """
    begin = f"import sys; sys.path[:] = {_OWN_PATH}; "
    if not own_path:
        path = [folder for folder in sys.path if isinstance(folder, str)]
        begin += (
            f"path = {path!r}; sys.path.extend(folder for folder in path if folder not in sys.path); "
            f"from {__name__} import follow_caller_later; follow_caller_later(path); "
        )
    return f"{begin}from {module} import main; sys.exit(main())"


def follow_caller_later(path: list[str]) -> None:
    """Notes the import path of the process that has started this one, for `follow_caller`."""
    global _callers
    _callers = path


def follow_caller() -> None:
    """Takes the import path of the process that has started this one. Call it when this process has imported what it
    needs itself."""
    global _callers
    if _callers is not None:
        sys.path[:] = _callers
        _callers = None


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
