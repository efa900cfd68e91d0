"""Slow workers: how they are detected, and which part of their tasks other workers should do. Pure.

MapReduce (Dean and Ghemawat, 2004, section 3.6) runs a slow worker's last tasks on two machines. A batch must not be
trained twice here, so the rest of the task is split off for an idle worker. Which worker splits, and where, follows
from the estimated time left, as in LATE (Zaharia et al., 2008).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elasticcb.master.task import BatchesLeft, TaskType

_WARM_UP_BATCHES = 5  # of each worker, not timed: compilation and cold caches
_REPORTS = 11  # maximum number of reports in a worker's median
_ENOUGH_REPORTS = 5
_SLOW, _NO_LONGER_SLOW = 2.0, 1.5  # in multiples of the median of the others
_LEAST_OTHERS = 2  # with only two workers, neither is known to be the slow one
# How long a worker must be slow without interruption to count as a straggler; and fast, to stop counting as one.
_LEAST_BATCHES, _LEAST_SECONDS = 10, 30.0
_LEAST_GAIN_SECONDS = 1.0  # minimum gain that justifies a split


@dataclass(frozen=True, slots=True)
class Split:
    """A worker should process the first `end` records of a leased task, and leave the rest to others."""

    lease: int
    end: int
    reason: str


class Paces:
    """How long a training batch takes on each worker.

    Attributes:
        stragglers: workers that have taken more than twice the median of the others for a while.
    """

    def __init__(self) -> None:
        self._batches: dict[int, int] = {}  # by worker, all reported batches
        self._reports: dict[int, deque[float]] = {}  # by worker, seconds per batch
        self._paces: dict[int, float] = {}
        self._evidence: dict[int, tuple[int, float]] = {}  # by worker, batches and seconds in favour of a change
        self.stragglers: set[int] = set()

    def note(self, worker: int, batches: int, seconds: float) -> str:
        """`worker` has trained `batches` batches in `seconds` seconds; returns a message when it becomes a straggler,
        or stops being one; "": no change."""
        if batches <= 0 or not 0 <= seconds < float("inf"):
            return ""
        before = self._batches.get(worker, 0)
        self._batches[worker] = before + batches
        if before < _WARM_UP_BATCHES:
            return ""
        reports = self._reports.setdefault(worker, deque(maxlen=_REPORTS))
        reports.append(seconds / batches)
        if len(reports) < _ENOUGH_REPORTS:
            return ""
        pace = self._paces[worker] = median(reports)
        others = [other for each, other in self._paces.items() if each != worker]
        if len(others) < _LEAST_OTHERS:
            self._evidence.pop(worker, None)
            self.stragglers.discard(worker)
            return ""
        usual, slow = median(others), worker in self.stragglers
        if pace >= _NO_LONGER_SLOW * usual if slow else pace <= _SLOW * usual:
            self._evidence.pop(worker, None)
            return ""
        counted, lasted = self._evidence.get(worker, (0, 0.0))
        self._evidence[worker] = counted, lasted = counted + batches, lasted + seconds
        if counted < _LEAST_BATCHES or lasted < _LEAST_SECONDS:
            return ""
        del self._evidence[worker]
        self.stragglers ^= {worker}
        is_what = "is no longer a straggler" if slow else "is a straggler"
        return f"{is_what}: {pace:.3g} s per batch; the median of the others is {usual:.3g} s"

    def forget(self, worker: int) -> None:
        """`worker` is gone."""
        for known in (self._batches, self._reports, self._paces, self._evidence):
            known.pop(worker, None)
        self.stragglers.discard(worker)

    def of(self, worker: int) -> float | None:
        """Seconds per batch; None: not known yet."""
        return self._paces.get(worker)

    def batches(self, worker: int) -> int:
        """Number of batches that `worker` has reported."""
        return self._batches.get(worker, 0)

    def knows(self, worker: int) -> bool:
        """Whether `worker` has reported batches; it needs the first ones to warm up."""
        return worker in self._batches

    @property
    def usual(self) -> float | None:
        """The median over all workers, in seconds per batch; None: not known yet."""
        return median(self._paces.values()) if self._paces else None


def plan_split(
    worker: int, left: Mapping[int, Sequence[BatchesLeft]], idle: Collection[int], paces: Paces
) -> Split | None:
    """How `worker` should split its task for one of the `idle` workers, if that saves time.

    It splits when fewer workers have more work left than there are idle ones: it gives away a task that it has not
    begun, or enough of its only task that both workers finish together.

    Args:
        left: by worker, the remaining batches of its leases, oldest first.
    """
    pace, own = paces.of(worker), left.get(worker, ())
    if pace is None or not own or any(entry.type is not TaskType.TRAINING for entry in own):
        return None
    seconds = {
        each: sum(entry.batches for entry in entries) * (paces.of(each) or 0.0) for each, entries in left.items()
    }
    if sum(other > seconds[worker] for other in seconds.values()) >= len(idle):
        return None
    others_pace = min(paces.of(each) or paces.usual or pace for each in idle)
    last = own[-1]
    if len(own) > 1:
        keep, end = 0, 0
        if last.reported:  # the worker does not run its tasks one after another
            return None
    else:
        keep = max(1, round(last.batches * others_pace / (pace + others_pace)))
        end = last.reported + keep * last.batch
        if not last.reported or end >= last.records:  # without a report, records may be processed in another order
            return None
    given = last.batches - keep
    gain = seconds[worker] - max(seconds[worker] - given * pace, given * others_pace)
    if gain < _LEAST_GAIN_SECONDS:
        return None
    return Split(last.lease, end, f"{given} batches, which would take it {given * pace:.2g} s, go to another worker")
