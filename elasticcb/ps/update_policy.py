"""When a server merges the movements of workers: each one at once, or those of a round together.

Pure: pushes in, decisions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from statistics import median
from typing import NamedTuple

from elasticcb.settings import TrainingSettings, Updates


class PushName(NamedTuple):
    """Identifies a push of a job; a retry has the same name."""

    worker: int
    sequence: int


_ABSENT = 4  # pushes of each worker, after which one that made none counts no more


class AtOnce:
    """Merges each movement when it arrives, scaled by 1/workers.

    Attributes:
        waiting: movements to merge later, in order of arrival.
    """

    def __init__(self) -> None:
        self.waiting: list[PushName] = []
        self._pushes = 0
        self._last: dict[int, int] = {}  # by worker, which push its last one was

    @property
    def workers(self) -> int:
        """Number by which a movement is divided: of the workers that have pushed lately."""
        return max(len(self._last), 1)

    def join(self, worker: int, epoch: int = 0, peers: Collection[int] = ()) -> None:
        """The worker takes part from now on, and so do its `peers`, unless they rest as of this `epoch`."""

    def rest(self, worker: int, epoch: int = 0) -> None:
        """The worker takes no part until it joins, or pushes. The others count more only if that takes long: what the
        last ones push in an epoch would else be several times as large as before."""

    def come(self, push: PushName) -> None:
        """A movement has come."""
        self.waiting.append(push)
        self._pushes += 1
        self._last[push.worker] = self._pushes
        oldest = self._pushes - _ABSENT * len(self._last)
        self._last = {worker: last for worker, last in self._last.items() if last > oldest}

    def due(self, lost_workers: Collection[int]) -> list[PushName]:
        """The movements to merge now."""
        return self.flush()

    def flush(self) -> list[PushName]:
        """All movements that wait, however few."""
        pushes, self.waiting = self.waiting, []
        return pushes

    @property
    def patience(self) -> float:
        """Seconds after which `due` may answer otherwise, although nothing has come."""
        return 0.0


_ROUNDS_KEPT = 9


class Rounds(AtOnce):
    """Merges the movements of all workers that take part together, as their mean.

    Args:
        waits_for_all: until a worker rests or is lost. Otherwise, after the first movement of a round, missing ones are
            awaited as long as the first movement usually takes after the previous round: the median of the last rounds,
            which a pause between two epochs does not change; at least `LEAST_SECONDS`. A worker whose movement came too
            late takes part again when it comes.
    """

    LEAST_SECONDS = 0.02
    _LOOK_SECONDS = 0.1  # for workers that were lost meanwhile

    def __init__(self, clock: Callable[[], float], waits_for_all: bool = False) -> None:
        super().__init__()
        self._clock, self._waits_for_all = clock, waits_for_all
        self._members: set[int] = set()
        self._joined: dict[int, int] = {}  # by worker, the epoch as of which it joined last
        self._rested: dict[int, int] = {}  # likewise, rested
        self._ended = self._first = clock()  # end of the last round; when the first movement of this one came
        self._usual: deque[float] = deque(maxlen=_ROUNDS_KEPT)  # seconds between these two

    @property
    def workers(self) -> int:
        return 1  # a mean is not divided again

    def join(self, worker: int, epoch: int = 0, peers: Collection[int] = ()) -> None:
        joining = {worker, *(peer for peer in peers if self._rested.get(peer, -1) < epoch)}
        self._members |= joining
        self._joined |= dict.fromkeys(joining, epoch)

    def rest(self, worker: int, epoch: int = 0) -> None:
        if epoch >= self._joined.get(worker, 0):  # else it rested before others joined it, and will tell it again
            self._members.discard(worker)
            self._rested[worker] = epoch

    def come(self, push: PushName) -> None:
        if not self.waiting:
            self._first = self._clock()
            self._usual.append(self._first - self._ended)
        self.waiting.append(push)
        self._members.add(push.worker)

    def due(self, lost_workers: Collection[int]) -> list[PushName]:
        if not self.waiting:
            return []
        come = {name.worker for name in self.waiting}
        if self._members.difference(lost_workers) <= come:
            return self.flush()
        if self._waits_for_all or self._left > 0:
            return []
        self._members = come
        return self.flush()

    @property
    def _left(self) -> float:
        """Seconds for which this round waits for missing movements."""
        return self._first + max(median(self._usual), self.LEAST_SECONDS) - self._clock()

    @property
    def patience(self) -> float:
        if self._waits_for_all or not self.waiting:
            return self._LOOK_SECONDS
        return min(max(self._left, 0.0), self._LOOK_SECONDS)

    def flush(self) -> list[PushName]:
        self._ended = self._clock()
        return super().flush()


def policy_of(training: TrainingSettings, clock: Callable[[], float]) -> AtOnce:
    """The policy for a job's settings."""
    if training.updates is Updates.ASYNC:
        return AtOnce()
    return Rounds(clock, waits_for_all=training.updates is Updates.SYNC)
