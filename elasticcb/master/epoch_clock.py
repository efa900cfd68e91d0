"""How long epochs take. Pure: time is an argument."""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """Of an epoch: seconds of training, and batches trained by all workers in that time."""

    seconds: float
    steps: int


class EpochClock:
    """Times consecutive epochs.

    Epochs may overlap: some workers begin the next epoch while others still have tasks of this one. Each epoch is timed
    from the end of the previous one, and counts everything trained in that time.

    Args:
        minibatch_size: records per step.
    """

    def __init__(self, minibatch_size: int) -> None:
        self._minibatch_size = minibatch_size
        self._begun, self._records = 0.0, 0
        self._paces: dict[int, Pace] = {}

    def begin(self, now: float, records: int) -> None:
        """An epoch begins; `records` were trained before it, over all epochs."""
        self._begun, self._records = now, records

    def trained(self, epoch: int, now: float, records: int) -> None:
        """All records of `epoch` are trained; the next epoch begins now, unless `begin` is called later."""
        self._paces[epoch] = Pace(now - self._begun, -(-(records - self._records) // self._minibatch_size))
        self.begin(now, records)

    def take(self, epoch: int) -> Pace:
        """The pace of an epoch that was `trained`; returned once."""
        return self._paces.pop(epoch)
