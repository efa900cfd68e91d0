"""Decides which checkpoint is next, from what was seen, without a clock or file system."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class CheckpointKind(Enum):
    """The type of a checkpoint on disk."""

    VERSION = "folder of a version"  # of a job; appears atomically
    KERAS = ".keras file"
    WEIGHTS = ".weights.h5 file"


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


class Ledger:
    """Returns each checkpoint once, and again if it was rewritten.

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
