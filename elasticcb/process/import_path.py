"""The import path of a job's processes: the same folders in the same order as in the process that starts them.

`python -m` puts the current folder first, where a `random.py` or `elasticcb/` would hide the real module. The
`elasticcb` command does not, so the processes of a job must not be started with `-m`.

When Python runs a script, the script's folder is also first. A process of a job imports more than the script, for
example click, and a user's file of that name must not hide it. So a process starts with Python's own import path,
followed by the caller's other folders, and switches to the caller's order after its own imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

# For another machine: its Python's own path, without the current folder.
_OWN_PATH = "[folder for folder in sys.path if folder]"


_callers: list[str] | None = None  # until this process has it


def python_code(module: str, own_path: bool = False) -> str:
    """A program for `python -c` that calls `main()` of a module of this package.

    Args:
        own_path: keep the import path of the Python that runs it. Otherwise, it uses that of this process from
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
    """Stores the import path of the process that started this one, for `follow_caller`."""
    global _callers
    _callers = path


def follow_caller() -> None:
    """Adopts the import path of the process that started this one. Call it after this process's own imports."""
    global _callers
    if _callers is not None:
        sys.path[:] = _callers
        _callers = None


def leave_out_current_folder() -> None:
    """Removes the entry that `python -m elasticcb` added to the import path; call it before any other import."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # If elasticcb is not installed, only that entry finds it.
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] != package:
        del sys.path[0]


def caller_path() -> list[str]:
    """The import path of this process, for `adopt_path` in others."""
    return [_absolute(folder) for folder in sys.path if isinstance(folder, str)]


def adopt_path(folders: Iterable[str]) -> None:
    """Adds missing folders of another process's import path; leading ones, such as a script's folder, stay first. On
    another machine, whose own folders may differ, existing entries keep their place."""
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
    # Some entries are not folders, but names for the finder of an editable installation.
    return os.path.abspath(folder) if not folder or os.path.exists(folder) else folder
