"""How many workers a job should have: a search by measured throughput. Pure; time is an argument.

The search doubles the worker count while throughput keeps up, then bisects between the largest count that was worth it
and the smallest that was not. It assumes diminishing returns per worker, so about 2 log2(n) measurements suffice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, stdev

from elasticcb.process.wording import how_many

_WARM_UP_SECONDS = 3.0  # ignored after each change
_SAMPLE_SECONDS = 4.0  # workers report every half second
_FEWEST_SAMPLES, _MOST_SAMPLES = 3, 10  # per measurement
_PRECISION = 0.03  # a measurement ends at this relative standard error of the mean
# Minimum marginal throughput, as a share of the previous per-worker rate: below the first, scale down; above the
# second, keep.
_LEAST_SHARE, _GOOD_SHARE = 0.25, 0.75
_LEAST_SECONDS_LEFT = 30.0  # do not add workers when the job ends sooner than this
_OTHER_LOAD = 0.3  # search again when throughput changes by this share
_LOOK_AGAIN_SECONDS = 900.0  # after a search; doubled after each search that changed nothing


@dataclass(frozen=True, slots=True)
class Sight:
    """The state of a job at one moment.

    Attributes:
        busy: whether all planned workers have tasks and nothing else (an evaluation, the end of an epoch) slows them
            down.
    """

    records: int
    records_left: int
    busy: bool


@dataclass(frozen=True, slots=True)
class Scaling:
    """The new number of workers, and why. `workers` may be unchanged when a search ends."""

    workers: int
    reason: str


class Throughput:
    """Measures records per second over undisturbed intervals.

    Args:
        warm_from: ignore everything before this time, in seconds; None: start with the next interval.
    """

    def __init__(self, warm_from: float | None = None) -> None:
        self._samples: list[float] = []
        self._warm_from = warm_from
        self._start: tuple[float, int] | None = None

    def observe(self, now: float, sight: Sight) -> float | None:
        """Records per second, once known precisely enough; else None."""
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
    """Results of one search.

    Attributes:
        good: the best number so far, with which others are compared.
        pays: whether the last workers of `good` are known to be worth it.
        too_many: the smallest number known to be too large.
        climbs: whether every number so far was fully worth it.
        settled: when the search ended; None while it runs.
    """

    began_with: int
    good: int
    pays: bool
    too_many: int
    climbs: bool = True
    rates: dict[int, float] = field(default_factory=dict)
    settled: float | None = None


class Autoscaler:
    """Searches for the largest number of workers at which the last ones still add enough throughput."""

    def __init__(self, least: int, most: int, workers: int) -> None:
        self._least, self._most = least, most
        self.workers = workers
        self._throughput = Throughput()
        self._wait_seconds = _LOOK_AGAIN_SECONDS
        self._search = self._begin()

    def _begin(self) -> _Search:
        return _Search(self.workers, self.workers, pays=self.workers == self._least, too_many=self._most + 1)

    def observe(self, now: float, sight: Sight) -> Scaling | None:
        """The change to make now, if any. Call it several times a second."""
        if self._search.settled is not None and now >= self._search.settled + self._wait_seconds:
            return self._search_again("periodic check")
        rate = self._throughput.observe(now, sight)
        if rate is None:
            return None
        if self._search.settled is not None:
            self._throughput = Throughput()
            before = self._search.rates[self.workers]
            if abs(rate - before) <= _OTHER_LOAD * before:
                return None
            self._wait_seconds = _LOOK_AGAIN_SECONDS
            return self._search_again(f"throughput changed from {before:,.0f} to {rate:,.0f} records/s")
        if sight.records_left < _LEAST_SECONDS_LEFT * rate:
            return None
        self._search.rates[self.workers] = rate
        return self._decide(now)

    def _search_again(self, why: str) -> Scaling:
        self._search, self._throughput = self._begin(), Throughput()
        return Scaling(self.workers, f"searching again from {how_many(self.workers, 'worker')}: {why}")

    def _decide(self, now: float) -> Scaling:
        """Continues the search from the rate just measured."""
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
        """Compares `number` with the best number so far, and replaces it if better; returns the result as text."""
        search = self._search
        fewer, more = sorted((number, search.good))
        ratio = search.rates[more] / search.rates[fewer]
        share = (ratio - 1) / (more / fewer - 1)
        pays = share >= _LEAST_SHARE
        if share >= _GOOD_SHARE or (pays and more == fewer + 1):
            search.good, search.pays = more, True
        else:
            # Diminishing returns: if all added workers together bring too little, so does each of them.
            first_may_pay = share * (more - fewer) >= _LEAST_SHARE
            search.too_many, search.climbs = (more + pays if first_may_pay else fewer + 1), False
            search.good, search.pays = (
                fewer,
                pays or (search.pays and number == more) or fewer == self._least,
            )
        times = f"{ratio:.2f} times the {search.rates[fewer]:,.0f} of {fewer}"
        return f"{_do(more)} {search.rates[more]:,.0f} records/s, {times}{'' if pays else ', which is not enough'}"

    def _next(self) -> int:
        """The number to measure next; `good` when the search is over."""
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
