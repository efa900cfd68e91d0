"""What a system can run out of: room on a disk, numbers for open files."""

from __future__ import annotations

import errno
import os
import resource

_MOST_FILES = 65_536  # a master with hundreds of workers has some thousands

_ADVICE = {
    errno.ENOSPC: "Make room, or name another folder.",
    errno.EDQUOT: "Make room, or name another folder.",
    errno.EROFS: "Name a folder that can be written.",
    errno.EMFILE: "Allow more open files: `ulimit -n 65536`, or LimitNOFILE= of its service.",
    errno.ENFILE: "The whole machine has too many open files: end other programs, or raise fs.file-max.",
}


def most_connections() -> int:
    """That this process should accept: half of the files that it may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES // 2 if soft == resource.RLIM_INFINITY else min(soft, _MOST_FILES) // 2


def is_scarcity(error: BaseException) -> bool:
    """Whether the system has run out of something, which is no mistake of a program."""
    return isinstance(error, OSError) and error.errno in _ADVICE


def is_full(error: BaseException) -> bool:
    """Whether there is no room on a disk, as the system says it or TensorFlow, whose errors have no number."""
    full = errno.ENOSPC, errno.EDQUOT
    if isinstance(error, OSError):
        return error.errno in full
    return any(os.strerror(number) in str(error) for number in full)


def describe_scarcity(error: OSError) -> str:
    """What happened, and what to do; of an error that `is_scarcity`."""
    where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, (str, bytes)) else ""
    files = f" (at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})" if error.errno == errno.EMFILE else ""
    return f"{error.strerror}{files}{where}. {_ADVICE[error.errno or 0]}"


def allow_many_files() -> None:
    """Raises this process's limit of open files as far as it may; shells often set a low one that can be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
