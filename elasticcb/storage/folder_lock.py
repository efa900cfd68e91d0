"""Exclusive ownership of a folder: a lock that ends with its process."""

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

LOCK_FILE = ".lock"
_LOOK_SECONDS = 0.05
ENDING_SECONDS = 2.0  # seconds to wait for an owner that was killed or is ending


class FolderInUseError(UsageError):
    """Another process owns a folder."""


class FolderLock:
    """Locks a folder from `take` to `release`, or until this process ends.

    Uses flock, which NFS 4 and all local file systems support. Without that support, it logs a warning and does not
    lock. A context manager.

    Args:
        folder: created if it does not exist.
        name: the user's name of the folder, for errors; "": the path.
        wait_seconds: how long to wait for an owner that is ending.
        file: lock file in the folder, one per purpose. It is kept, and names the last owner.
    """

    def __init__(self, folder: Path, name: str = "", wait_seconds: float = 0.0, file: str = LOCK_FILE) -> None:
        self._folder, self._wait_seconds, self._file = folder, wait_seconds, file
        self._name = name or str(folder)
        self._descriptor: int | None = None

    def take(self) -> None:
        """Does nothing if this object holds the lock already.

        Raises:
            FolderInUseError: another object, here or in another process, holds the lock.
            UsageError: the lock file is a link.
            OSError: the folder can't be created or written to.
        """
        if self.is_held:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / self._file
        if path.is_symlink():
            raise UsageError(f"{path} is a symbolic link, which could redirect writes to another file. Remove it.")
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
                        f"{self._name} is in use by {owner}; two jobs would delete each other's files. Wait until it "
                        "ends, stop it (`elasticcb stop FOLDER`), or choose another folder."
                    ) from None
                time.sleep(_LOOK_SECONDS)
            except OSError as error:
                logger.warning(
                    "The file system of %s does not support locks (%s); make sure that no two jobs use it",
                    self._folder,
                    error.strerror,
                )
                break
        with contextlib.suppress(OSError):  # the disk is full, but the lock is valid
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {host_name()}".encode(), 0)

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def problem(self) -> str:
        """As `StoreLock.problem`: nobody can take it meanwhile."""
        return ""

    def release(self) -> None:
        """Releases the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FolderLock:
        """Raises as `take`, but `UsageError` instead of `OSError`."""
        try:
            self.take()
        except OSError as error:
            raise UsageError(
                f"{self._name} can't be used: {error}. Choose another folder, or change its owner."
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_owned(folder: Path, file: str = LOCK_FILE) -> bool:
    """Whether a process owns a folder, for the purpose of `file`. Raises `OSError` if that is unknown, or nobody ever
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
def held(folder: Path, waits: bool = False) -> Iterator[bool]:
    """Context manager that locks a folder itself, with no file in it; yields False if another object has it.

    Args:
        waits: until nobody else has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        is_free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            is_free = False
        except OSError as error:
            logger.debug("The file system of %s does not support locks: %s", folder, error)
        yield is_free
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_if_free(folder: Path) -> Iterator[bool]:
    """Context manager: whether a folder was locked before and is free now; it stays free inside. False if unknown."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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
