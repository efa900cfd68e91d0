"""How many workers a job should have: a search by measured throughput. Pure; time is an argument.

The search doubles the workers while that pays, and then halves the gap between a number that paid and one that did
not. It takes it that a worker more brings no more than the one before, so that some 2 log2(n) measurements do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, stdev

from elasticcb.process.wording import how_many

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
    """Measures records per second over spans in which nothing disturbs.

    Args:
        warm_from: nothing before it (seconds) counts; None: from the next span on.
    """

    def __init__(self, warm_from: float | None = None) -> None:
        self._samples: list[float] = []
        self._warm_from = warm_from
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


@dataclass
class _Search:
    """What one search has found.

    Attributes:
        began_with: workers.
        good: the number that others are compared with.
        pays: whether it is known that the last workers of `good` pay.
        too_many: the smallest number that does not pay.
        climbs: whether no number has been found yet that does not pay in full.
        rates: records per second by number of workers.
        settled: since when it is over.
    """

    began_with: int
    good: int
    pays: bool
    too_many: int
    climbs: bool = True
    rates: dict[int, float] = field(default_factory=dict)
    settled: float | None = None


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
        self._search = self._begin()

    def _begin(self) -> _Search:
        return _Search(self.workers, self.workers, pays=self.workers == self._least, too_many=self._most + 1)

    def observe(self, now: float, sight: Sight) -> Scaling | None:
        """What to change now, if anything. Call it some times a second."""
        if self._search.settled is not None and now >= self._search.settled + self._wait_seconds:
            return self._search_again("it is time to")
        rate = self._throughput.observe(now, sight)
        if rate is None:
            return None
        if self._search.settled is not None:
            self._throughput = Throughput()
            before = self._search.rates[self.workers]
            if abs(rate - before) <= _OTHER_LOAD * before:
                return None
            self._wait_seconds = _LOOK_AGAIN_SECONDS
            return self._search_again(f"{rate:,.0f} records/s are no longer the {before:,.0f} of before")
        if sight.records_left < _LEAST_SECONDS_LEFT * rate:
            return None
        self._search.rates[self.workers] = rate
        return self._decide(now)

    def _search_again(self, why: str) -> Scaling:
        self._search, self._throughput = self._begin(), Throughput()
        return Scaling(self.workers, f"looks again whether {self.workers} is the best number: {why}")

    def _decide(self, now: float) -> Scaling:
        """The present number is measured: where to go from here."""
        here, following = self.workers, self.workers
        story = f"{_do(here)} {self._search.rates[here]:,.0f} records/s"
        while following in self._search.rates:
            if following != self._search.good:
                story = self._compare(following)
            candidate = self._next()
            if candidate == self._search.good:
                return self._settle(now, here, story)
            following = candidate
        self.workers = following
        self._throughput = Throughput(now)
        return Scaling(following, f"{here} -> {how_many(following, 'worker')}: {story}")

    def _compare(self, number: int) -> str:
        """Compares `number` with the good one, which it may become; answers what was found."""
        search = self._search
        fewer, more = sorted((number, search.good))
        ratio = search.rates[more] / search.rates[fewer]
        share = (ratio - 1) / (more / fewer - 1)
        pays = share >= _LEAST_SHARE
        if share >= _GOOD_SHARE or (pays and more == fewer + 1):
            search.good, search.pays = more, True
        else:
            # The first brings most, so that none does when all of them together bring less than it would have to.
            first_may_pay = share * (more - fewer) >= _LEAST_SHARE
            search.too_many, search.climbs = (more + pays if first_may_pay else fewer + 1), False
            search.good, search.pays = (
                fewer,
                pays or (search.pays and number == more) or fewer == self._least,
            )
        times = f"{ratio:.2f} times the {search.rates[fewer]:,.0f} of {fewer}"
        return f"{_do(more)} {search.rates[more]:,.0f} records/s, {times}{'' if pays else ', which is not enough'}"

    def _next(self) -> int:
        """The number to measure next; the good one when the search is over."""
        search = self._search
        if search.climbs and search.good < self._most:
            return min(2 * search.good, self._most)
        if search.too_many - search.good > 1:
            return (search.good + search.too_many) // 2
        return search.good if search.pays else max(self._least, search.good // 2)

    def _settle(self, now: float, here: int, story: str) -> Scaling:
        search = self._search
        self.workers, search.settled = search.good, now
        self._throughput = Throughput(now)
        self._wait_seconds = 2 * self._wait_seconds if search.good == search.began_with else _LOOK_AGAIN_SECONDS
        change = "stays with" if search.good == here else f"{here} ->"
        return Scaling(search.good, f"{change} {how_many(search.good, 'worker')}: {story}")


def _do(workers: int) -> str:
    return f"{workers} do" if workers > 1 else "1 does"
