"""How many workers a job should have: a search by measured throughput. Pure; time is an argument.

The search doubles the workers while that pays, and then halves the gap between a number that paid and one that did
not. It takes it that a worker more brings no more than the one before, so that some 2 log2(n) measurements do.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, stdev

_WARM_UP_SECONDS = 3.0  # after a change, before it counts
_SAMPLE_SECONDS = 4.0  # workers report each half second
_FEWEST_SAMPLES, _MOST_SAMPLES = 3, 10  # of a measurement
_PRECISION = 0.03  # standard error of a measurement, of its mean, that is enough
# Of what a worker did before, that each one more must bring: with less they go, with so much they stay.
_LEAST_SHARE, _GOOD_SHARE = 0.25, 0.75
_LEAST_SECONDS_LEFT = 30.0  # of the job; with less, no worker is added
_OTHER_LOAD = 0.3  # by so much of it the throughput has changed: look again
_LOOK_AGAIN_SECONDS = 900.0  # after a search; twice as long after each that ends where it began


@dataclass(frozen=True, slots=True)
class Sight:
    """What a job looks like at one moment.

    Attributes:
        records: trained up to now.
        records_left: to train.
        busy: all workers that there are to be have tasks, and nothing else (an evaluation, the end of an epoch)
            takes from their time.
    """

    records: int
    records_left: int
    busy: bool


@dataclass(frozen=True, slots=True)
class Scaling:
    """From now on there are to be so many workers, and why. `workers` may be what it was: the search is over."""

    workers: int
    reason: str


class Throughput:
    """Measures records per second over spans in which nothing disturbs."""

    def __init__(self) -> None:
        self.restart(None)

    def restart(self, from_: float | None) -> None:
        """Forgets what was measured; nothing before `from_` (seconds) counts. None: from the next span on."""
        self._samples: list[float] = []
        self._warm_from = from_
        self._start: tuple[float, int] | None = None

    def observe(self, now: float, sight: Sight) -> float | None:
        """Records per second, when they are known well enough."""
        if not sight.busy:
            self._start = None
            self._warm_from = None if self._warm_from is None else max(self._warm_from, now)
            return None
        if self._warm_from is not None:
            if now < self._warm_from + _WARM_UP_SECONDS:
                return None
            self._warm_from = None
        if self._start is None:
            self._start = (now, sight.records)
            return None
        began, records = self._start
        if now - began < _SAMPLE_SECONDS:
            return None
        self._start = (now, sight.records)
        self._samples.append((sight.records - records) / (now - began))
        if len(self._samples) < _FEWEST_SAMPLES:
            return None
        middle = mean(self._samples)
        error = stdev(self._samples) / len(self._samples) ** 0.5
        if error > _PRECISION * middle and len(self._samples) < _MOST_SAMPLES:
            return None
        return middle if middle > 0 else None


class Autoscaler:
    """Searches for the largest number of workers of which the last ones pay.

    Args:
        least, most: workers, at least 1.
        workers: that there are now, within these.

    Attributes:
        workers: that there should be.
    """

    def __init__(self, least: int, most: int, workers: int) -> None:
        self._least, self._most = least, most
        self.workers = workers
        self._throughput = Throughput()
        self._wait_seconds = _LOOK_AGAIN_SECONDS
        self._begin()

    def _begin(self) -> None:
        self._rates: dict[int, float] = {}  # by number of workers, records per second
        self._good = self.workers  # the number that others are compared with
        self._pays = self.workers == self._least  # whether it is known that its last workers pay
        self._too_many = self._most + 1  # the smallest number that does not pay
        self._climbs = True  # whether no number has been found yet that does not pay in full
        self._settled: float | None = None  # since when the search is over
        self._began_with = self.workers

    def observe(self, now: float, sight: Sight) -> Scaling | None:
        """What to change now, if anything. Call it some times a second."""
        if self._settled is not None and now >= self._settled + self._wait_seconds:
            return self._search_again("it is time to")
        rate = self._throughput.observe(now, sight)
        if rate is None:
            return None
        if self._settled is not None:
            self._throughput.restart(None)
            before = self._rates[self.workers]
            if abs(rate - before) <= _OTHER_LOAD * before:
                return None
            self._wait_seconds = _LOOK_AGAIN_SECONDS
            return self._search_again(f"{rate:,.0f} records/s are no longer the {before:,.0f} of before")
        if sight.records_left < _LEAST_SECONDS_LEFT * rate:
            return None
        self._rates[self.workers] = rate
        return self._decide(now)

    def _search_again(self, why: str) -> Scaling:
        self._begin()
        self._throughput.restart(None)
        return Scaling(self.workers, f"looks again whether {self.workers} is the best number: {why}")

    def _decide(self, now: float) -> Scaling:
        """The present number is measured: where to go from here."""
        here, following = self.workers, self.workers
        story = f"{_do(here)} {self._rates[here]:,.0f} records/s"
        while following in self._rates:
            if following != self._good:
                story = self._compare(following)
            candidate = self._next()
            if candidate == self._good:
                return self._settle(now, here, story)
            following = candidate
        self.workers = following
        self._throughput.restart(now)
        return Scaling(following, f"{here} -> {_workers(following)}: {story}")

    def _compare(self, number: int) -> str:
        """Compares `number` with the good one, which it may become; answers what was found."""
        fewer, more = sorted((number, self._good))
        ratio = self._rates[more] / self._rates[fewer]
        share = (ratio - 1) / (more / fewer - 1)
        pays = share >= _LEAST_SHARE
        if share >= _GOOD_SHARE or (pays and more == fewer + 1):
            self._good, self._pays = more, True
        else:
            # The first brings most, so that none does when all of them together bring less than it would have to.
            first_may_pay = share * (more - fewer) >= _LEAST_SHARE
            self._too_many, self._climbs = (more + pays if first_may_pay else fewer + 1), False
            self._good, self._pays = fewer, pays or (self._pays and number == more) or fewer == self._least
        times = f"{ratio:.2f} times the {self._rates[fewer]:,.0f} of {fewer}"
        return f"{_do(more)} {self._rates[more]:,.0f} records/s, {times}{'' if pays else ', which is not enough'}"

    def _next(self) -> int:
        """The number to measure next; the good one when the search is over."""
        if self._climbs and self._good < self._most:
            return min(2 * self._good, self._most)
        if self._too_many - self._good > 1:
            return (self._good + self._too_many) // 2
        return self._good if self._pays else max(self._least, self._good // 2)

    def _settle(self, now: float, here: int, story: str) -> Scaling:
        self.workers, self._settled = self._good, now
        self._throughput.restart(now)
        self._wait_seconds = 2 * self._wait_seconds if self._good == self._began_with else _LOOK_AGAIN_SECONDS
        change = "stays with" if self._good == here else f"{here} ->"
        return Scaling(self._good, f"{change} {_workers(self._good)}: {story}")


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _do(workers: int) -> str:
    return f"{workers} do" if workers > 1 else "1 does"
