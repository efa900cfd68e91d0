"""This process in its operating system: its name in `ps` and `top`, disk space, file descriptors, and files that
TensorFlow leaves. It ends together with the process that started it, however that one ends.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import resource
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elasticcb.errors import GENERATED

_modules = 0  # of Python, at the last look for generated files
_watch: int | None = None  # a file that becomes readable when this process must end


def follow_file(watch: int) -> None:
    """Makes `follow_parent` watch a file instead, which becomes readable when this process must end."""
    global _watch
    _watch = watch


def follow_parent(parent_pid: int, last: Callable[[], None] = lambda: None) -> None:
    """Makes this process end when its parent ends, even by SIGKILL; `last` is called before.

    Call it before anything slow. If the parent is gone already, the process ends here.
    """
    watch = _watch

    def end() -> None:
        try:
            last()
        finally:
            os._exit(1)

    def follow() -> None:
        if watch is None:
            while os.getppid() == parent_pid:
                time.sleep(0.5)
        else:
            poller = select.poll()
            poller.register(watch, select.POLLIN)
            poller.poll()
        end()

    if watch is None and os.getppid() != parent_pid:
        end()
    # Not with prctl(PR_SET_PDEATHSIG), which triggers when the thread that started this process ends.
    threading.Thread(target=follow, name="parent", daemon=True).start()


def show_as(name: str, job: str = "") -> None:
    """Names this process "elasticcb NAME of JOB", and briefly `name`, of which Linux keeps 15 characters (`ps -e`)."""
    os.environ.setdefault("SPT_NOENV", "1")  # what /proc tells of the environment stays
    from setproctitle import setproctitle

    setproctitle(f"elasticcb {name} of {job}" if job else f"elasticcb {name}")
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/comm").write_text(name)


_MOST_FILES = 65_536  # a master with hundreds of workers uses thousands

_ADVICE = {
    errno.ENOSPC: "Free some space, or choose another folder.",
    errno.EDQUOT: "Free some space, or choose another folder.",
    errno.EROFS: "Choose a writable folder.",
    errno.EMFILE: "Allow more open files: `ulimit -n 65536`, or LimitNOFILE= of its service.",
    errno.ENFILE: "The machine has too many open files. Stop other programs, or raise fs.file-max.",
}


def most_connections() -> int:
    """Number of connections that this process should accept: half of its limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES // 2 if soft == resource.RLIM_INFINITY else min(soft, _MOST_FILES) // 2


def is_scarcity(error: BaseException) -> bool:
    """Whether the system has run out of a resource, which is not a bug."""
    return isinstance(error, OSError) and error.errno in _ADVICE


def is_full(error: BaseException) -> bool:
    """Whether a disk is full, according to the system or to TensorFlow, whose errors have no number."""
    full = errno.ENOSPC, errno.EDQUOT
    if isinstance(error, OSError):
        return error.errno in full
    return any(os.strerror(number) in str(error) for number in full)


def describe_scarcity(error: OSError) -> str:
    """Explains an error that `is_scarcity`, with advice."""
    where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, (str, bytes)) else ""
    files = f" (at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})" if error.errno == errno.EMFILE else ""
    return f"{error.strerror}{files}{where}. {_ADVICE[error.errno or 0]}"


def allow_many_files() -> None:
    """Raises this process's limit of open files as far as allowed; shells often set a low soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def missing_module(what: str, extra: str, *modules: str) -> str:
    """The message that `what` needs one of these Python modules, which an extra of this package installs; "": all are
    there."""
    missing = next((each for each in modules if importlib.util.find_spec(each) is None), "")
    return missing and f"{what} needs the Python module {missing}. Install it with: pip install 'elasticcb[{extra}]'"


def remove_generated_files() -> None:
    """Removes the source files that TensorFlow writes to the temporary folder for each function that it traces, as far
    as this process has read them. TensorFlow does so only at a normal exit, but workers are killed at the end of a job.
    Costs nothing unless there are new modules."""
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
