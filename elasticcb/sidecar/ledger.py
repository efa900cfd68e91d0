"""Which checkpoint is next: a decision about what was seen, without a clock and without a file system."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class CheckpointKind(Enum):
    """What a checkpoint is on disk."""

    VERSION = "folder of a version"  # of a job; appears at once, whole
    KERAS = ".keras file"
    WEIGHTS = ".weights.h5 file"


class Signature(NamedTuple):
    """What changes when a file is written anew."""

    modified: int  # nanoseconds
    size: int  # bytes
    inode: int


class ListedCheckpoint(NamedTuple):
    """A checkpoint as a listing of its folder shows it."""

    path: str
    kind: CheckpointKind
    signature: Signature  # of a folder: that of its manifest
    order: int  # the version of a folder, the time of a file: older first


class Ledger:
    """Gives out each checkpoint once, and again when it was written anew.

    Folders come first, by version, then files, by time; nothing is left out because something newer is there.

    Args:
        settle_seconds: how long a file must stay as it is before it is given out: it may be half written.
    """

    def __init__(self, settle_seconds: float) -> None:
        self._settle = settle_seconds
        self._given: dict[str, Signature] = {}
        self._settling: dict[str, tuple[Signature, float]] = {}  # what a file looked like first, and when

    def take(self, sightings: Iterable[ListedCheckpoint], now: float) -> ListedCheckpoint | None:
        """The next checkpoint; it counts as given out. None when there is none that is new and settled.

        Args:
            sightings: all that is there.
            now: seconds, of a clock that never goes back.
        """
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
