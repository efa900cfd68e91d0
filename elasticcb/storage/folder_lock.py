"""One owner of a folder at a time: a lock that lives and dies with its process."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from elasticcb.errors import UsageError
from elasticcb.process.host import host_name

logger = logging.getLogger(__name__)

_FILE = ".lock"
_LOOK_SECONDS = 0.05
ENDING_SECONDS = 2.0  # for an owner that was killed, or asked to end


class FolderInUseError(UsageError):
    """Another process owns a folder."""


class FolderLock:
    """Keeps others from a folder, from `take` to `release`, or to the end of this process, however it ends.

    It is a lock of the system (flock), which NFS 4 and all local file systems have; where there is none, the log says
    so and nobody is kept away. A context manager.

    Args:
        folder: is made.
        name: for errors, as the user gave it; "": the path.
        wait_seconds: for an owner that is about to end.
        file: in the folder, for each use of it another one. It stays there, and tells who has locked it last.
    """

    def __init__(self, folder: Path, name: str = "", wait_seconds: float = 0.0, file: str = _FILE) -> None:
        self._folder, self._wait_seconds, self._file = folder, wait_seconds, file
        self._name = name or str(folder)
        self._descriptor: int | None = None

    def take(self) -> None:
        """Does nothing when this object has it already.

        Raises:
            FolderInUseError: another one, here or in another process, has it.
            UsageError: its file is a link.
            OSError: the folder can't be made, or written to.
        """
        if self.is_held:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / self._file
        if path.is_symlink():
            raise UsageError(f"{path} is a link: somebody may want another file to be written to. Remove it.")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._lock(descriptor, time.monotonic() + self._wait_seconds)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _lock(self, descriptor: int, give_up: float) -> None:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                    raise FolderInUseError(
                        f"{self._name} is in use by {owner}: two jobs would delete each other's files. Wait for its "
                        "end, stop it (`elasticcb stop FOLDER`), or name another folder."
                    ) from None
                time.sleep(_LOOK_SECONDS)
            except OSError as error:
                logger.warning(
                    "The file system of %s knows no locks (%s): see to it that no two jobs use it",
                    self._folder,
                    error.strerror,
                )
                break
        with contextlib.suppress(OSError):  # no room: the lock counts all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {host_name()}".encode(), 0)

    @property
    def is_held(self) -> bool:
        """Whether this object has it."""
        return self._descriptor is not None

    def release(self) -> None:
        """Lets others have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_owned(folder: Path, file: str = _FILE) -> bool:
    """Whether a process owns a folder, for the use of `file`. Raises `OSError` where that can't be told, or nobody ever
    did."""
    descriptor = os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def held_if_free(folder: Path) -> Iterator[bool]:
    """Whether a folder was locked and is so no more, which holds within it; false also where that can't be told."""
    try:
        descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        is_free = False
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        yield is_free
    finally:
        os.close(descriptor)
