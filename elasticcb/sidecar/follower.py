"""Follows a folder of checkpoints, ours and those of `keras.callbacks.ModelCheckpoint`.

A file is never opened in place with HDF5, whose lock would make a writer fail: it is copied first. Incomplete files are
skipped until they change.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.checkpoint.manifest import MANIFEST, read_manifest
from elasticcb.checkpoint.versions import find_versions, version_of
from elasticcb.errors import CheckpointError, UsageError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5

Shape = tuple[int, ...]

_INSIDE = "model.weights.h5"  # member of a .keras file, which is a zip
# Paths of an optimizer's step count; the outer one belongs to a wrapper such as LossScaleOptimizer.
_ITERATIONS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")


class CheckpointKind(Enum):
    """The type of a checkpoint on disk."""

    VERSION = "folder of a version"  # of a job; appears atomically
    KERAS = ".keras file"
    WEIGHTS = ".weights.h5 file"


_SUFFIXES = {".keras": CheckpointKind.KERAS, ".weights.h5": CheckpointKind.WEIGHTS}


class Signature(NamedTuple):
    """Properties that change when a file is rewritten."""

    modified: int  # nanoseconds
    size: int  # bytes
    inode: int


class ListedCheckpoint(NamedTuple):
    """A checkpoint in a listing of its folder."""

    path: str
    kind: CheckpointKind
    signature: Signature  # for a folder: of its manifest
    order: int  # the version of a folder, or the time of a file: older first


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        version: model version; for a file, the optimizer's iterations; None if a file does not contain it.
        content: path to read; for a file, a copy, which exists until the next checkpoint is requested.
    """

    path: Path
    kind: CheckpointKind
    version: int | None
    content: Path

    @property
    def is_there(self) -> bool:
        """Whether it still exists."""
        return (self.path / MANIFEST).is_file() if self.kind is CheckpointKind.VERSION else self.path.is_file()


class CheckpointFollower:
    """Returns each checkpoint of a folder once, in order: existing ones, then new ones when they appear.

    Versions of a job are ordered by version, files by time. A file that is overwritten repeatedly is returned each
    time, provided it stays unchanged for `poll_seconds`.

    Args:
        path: path of the folder, which need not exist yet; or of one `.keras` or `.weights.h5` file.
        files: whether to follow Keras's files as well as versions of a job.

    Raises:
        UsageError: `path` is the folder of a single version, or a file of another kind.
    """

    def __init__(self, path: str | os.PathLike[str], poll_seconds: float = POLL_SECONDS, files: bool = True) -> None:
        self._path = Path(path).absolute()
        if (self._path / MANIFEST).is_file():
            raise UsageError(
                f"{self._path} is a single checkpoint, which does not change. Pass the folder that contains the "
                f"checkpoints: {self._path.parent}"
            )
        self._single = _kind(self._path.name) if not self._path.is_dir() else None
        if self._path.is_file() and self._single is None:
            raise UsageError(
                f"{self._path} is not a supported checkpoint file. Expected a folder of checkpoints, or a file that "
                f"ends in {' or '.join(_SUFFIXES)}."
            )
        if poll_seconds <= 0:
            raise UsageError(f"poll_seconds={poll_seconds} is invalid. Expected more than 0.")
        self._poll_seconds = poll_seconds
        self._files = files
        self._ledger = Ledger(poll_seconds)
        self._stop = threading.Event()
        self._copies: tempfile.TemporaryDirectory[str] | None = None

    def next(self, timeout: float | None = None) -> Checkpoint | None:
        """Waits for the next checkpoint.

        Returns:
            None if none appeared in time, or `stop` was called.

        Raises:
            CheckpointError: the folder can't be read.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        while not self._stop.is_set():
            now = time.monotonic()
            sighting = self._ledger.take(self._sightings(), now)
            if sighting is not None:
                checkpoint = self._open(sighting)
                if checkpoint is not None:
                    return checkpoint
            elif give_up is not None and now >= give_up:
                return None
            else:
                left = self._poll_seconds if give_up is None else min(self._poll_seconds, give_up - now)
                self._stop.wait(left)
        return None

    def stop(self) -> None:
        """Makes `next` return None until `close`; any thread may call it."""
        self._stop.set()

    def close(self) -> None:
        """Ends a series of `next` calls and deletes the copies. A later series continues from there."""
        self._stop.clear()
        if self._copies is not None:
            self._copies.cleanup()
            self._copies = None

    def _sightings(self) -> list[ListedCheckpoint]:
        """The checkpoints that exist now."""
        try:
            return list(self._look())
        except FileNotFoundError:
            return []  # the folder was deleted meanwhile
        except OSError as error:
            raise CheckpointError(f"The folder {self._path} can't be read: {error}. Check its permissions.") from error

    def _look(self) -> Iterator[ListedCheckpoint]:
        if self._single is not None:
            yield from _sighted_file(self._path, self._single)
            return
        for folder in find_versions(self._path):
            signature = _signature(folder / MANIFEST)
            if signature is not None:
                yield ListedCheckpoint(str(folder), CheckpointKind.VERSION, signature, version_of(folder.name))
        if self._files and self._path.is_dir():
            for entry in os.scandir(self._path):
                kind = _kind(entry.name)
                if kind is not None and entry.is_file():
                    yield from _sighted_file(Path(entry.path), kind)

    def _open(self, sighting: ListedCheckpoint) -> Checkpoint | None:
        """The checkpoint, or None if it is incomplete."""
        path = Path(sighting.path)
        try:
            if sighting.kind is CheckpointKind.VERSION:
                return Checkpoint(path, sighting.kind, int(read_manifest(path)["version"]), path)
            copy = self._copy(path)
            if _signature(path) != sighting.signature:
                return None  # written meanwhile; it will be found again
            _verify_file(copy)
            return Checkpoint(path, sighting.kind, _saved_iterations(copy), copy)
        except (CheckpointError, OSError) as error:
            if path.exists():  # otherwise not worth a warning
                logger.warning("Skipped until it changes: %s. %s", path, error)
            return None

    def _copy(self, path: Path) -> Path:
        if self._copies is not None:
            self._copies.cleanup()
        self._copies = tempfile.TemporaryDirectory(prefix="elasticcb-")
        return Path(shutil.copyfile(path, Path(self._copies.name, path.name)))


def _kind(name: str) -> CheckpointKind | None:
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def _sighted_file(path: Path, kind: CheckpointKind) -> Iterator[ListedCheckpoint]:
    signature = _signature(path)
    if signature is not None:
        yield ListedCheckpoint(str(path), kind, signature, signature.modified)


def _signature(path: Path) -> Signature | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return Signature(found.st_mtime_ns, found.st_size, found.st_ino)


class Ledger:
    """Decides which checkpoint is next, from what was seen: returns each once, and again if it was rewritten.

    Folders come first, by version, then files, by time; none is skipped because a newer one exists.

    Args:
        settle_seconds: how long a file must stay unchanged before it is returned, because it may be incomplete.
    """

    def __init__(self, settle_seconds: float) -> None:
        self._settle = settle_seconds
        self._given: dict[str, Signature] = {}
        self._settling: dict[str, tuple[Signature, float]] = {}  # first observed state of a file, and when

    def take(self, sightings: Iterable[ListedCheckpoint], now: float) -> ListedCheckpoint | None:
        """Returns the next checkpoint and marks it as returned. None if no new one is settled."""
        ready = [sighting for sighting in sightings if self._is_new(sighting) and self._is_settled(sighting, now)]
        if not ready:
            return None
        chosen = min(
            ready, key=lambda sighting: (sighting.kind is not CheckpointKind.VERSION, sighting.order, sighting.path)
        )
        self._given[chosen.path] = chosen.signature
        self._settling.pop(chosen.path, None)
        return chosen

    def _is_new(self, sighting: ListedCheckpoint) -> bool:
        return self._given.get(sighting.path) != sighting.signature

    def _is_settled(self, sighting: ListedCheckpoint, now: float) -> bool:
        if sighting.kind is CheckpointKind.VERSION:
            return True
        signature, since = self._settling.get(sighting.path, (None, now))
        if signature != sighting.signature:
            self._settling[sighting.path] = sighting.signature, now
            since = now
        return now - since >= self._settle


def _verify_file(path: Path) -> None:
    """Raises `CheckpointError` if the file is incomplete."""
    try:
        if path.name.endswith(".keras"):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
                if damaged or _INSIDE not in archive.namelist():
                    raise CheckpointError(f"The file is damaged: {damaged or 'it contains no weights'}.")
        with _opened(path):
            pass
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"The file is incomplete: {error}.") from error


def _saved_iterations(path: Path) -> int | None:
    """The number of steps of the optimizer in the file; None if there is no optimizer."""
    with _opened(path) as file:
        for name in _ITERATIONS:
            found = file.get(name)
            if getattr(found, "shape", None) == () and found.dtype.kind in "iu":
                return int(found[()])
    return None


def saved_variables(path: Path) -> dict[str, Shape]:
    """Shapes of the model's variables by their path in the file, without optimizer variables."""
    shapes: dict[str, Shape] = {}

    def note(name: str, item: Any) -> None:
        if hasattr(item, "shape") and not any("optimizer" in part for part in name.split("/")):
            shapes[name] = tuple(item.shape)

    with _opened(path) as file:
        file.visititems(note)
    return shapes


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import h5py

    if path.name.endswith(".keras"):
        with zipfile.ZipFile(path) as archive, archive.open(_INSIDE) as inner, h5py.File(inner, "r") as file:
            yield file
    else:
        with h5py.File(path, "r") as file:
            yield file
