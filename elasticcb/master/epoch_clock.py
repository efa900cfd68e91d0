"""How long epochs take. Pure: the caller tells the time."""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """Of an epoch: seconds of training, and batches that all workers trained meanwhile."""

    seconds: float
    steps: int


class EpochClock:
    """Times epochs one after another.

    Epochs may overlap: workers begin the next one while others have tasks of this one. Each counts from the end of the
    one before, with all that was trained meanwhile.

    Args:
        minibatch_size: records per step.
    """

    def __init__(self, minibatch_size: int) -> None:
        self._minibatch_size = minibatch_size
        self._begun, self._records = 0.0, 0
        self._paces: dict[int, Pace] = {}

    def begin(self, now: float, records: int) -> None:
        """An epoch begins; `records` were trained before, over all epochs."""
        self._begun, self._records = now, records

    def trained(self, epoch: int, now: float, records: int) -> None:
        """All records of `epoch` are trained; the next one begins, unless `begin` says so later."""
        self._paces[epoch] = Pace(now - self._begun, -(-(records - self._records) // self._minibatch_size))
        self.begin(now, records)

    def take(self, epoch: int) -> Pace:
        """Of an epoch that was `trained`, once."""
        return self._paces.pop(epoch)
