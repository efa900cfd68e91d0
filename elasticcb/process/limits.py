"""Scarce system resources: disk space and file descriptors."""

from __future__ import annotations

import errno
import os
import resource

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
