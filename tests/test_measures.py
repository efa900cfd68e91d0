"""What processes count of themselves, and how it travels."""

from __future__ import annotations

import math

import pytest

from elasticcb.errors import WireError
from elasticcb.process.stats import BOUNDS, LOOKUP, PUSH, STALENESS, Histogram, Measures, Stats, TableSize
from elasticcb.proto import elasticcb_pb2 as pb


def test_a_range_includes_its_upper_bound_and_the_last_one_has_none() -> None:
    histogram = Histogram((0, 1, 2))
    for value in (0, 0.5, 1, 2, 2.1, 1000):
        histogram.observe(value)
    assert histogram.counts == [1, 2, 1, 2]
    assert histogram.sum == pytest.approx(1005.6)


def test_what_a_process_counts_arrives_as_it_was() -> None:
    measures = Measures()
    measures.rows_looked_up = 7
    measures.refused_calls = lambda: {"malformed": 3}
    measures.certificate_expires = lambda: 1.8e9
    measures.tables = lambda: {"users/embeddings": TableSize(5, 400)}
    for _ in range(5):
        measures.histograms[PUSH].observe(0.02)
    measures.histograms[STALENESS].observe(2)
    stats = Stats.from_message(measures.to_message())
    assert (stats.rows_looked_up, stats.refused_calls) == (7, {"malformed": 3})
    assert stats.certificate_expires == 1.8e9
    assert stats.tables == {"users/embeddings": TableSize(5, 400)}
    assert stats.cpu_seconds > 0
    for name, histogram in measures.histograms.items():
        assert (stats.histograms[name].counts, stats.histograms[name].sum) == (histogram.counts, histogram.sum)
    assert sum(stats.histograms[LOOKUP].counts) == 0


@pytest.mark.parametrize(
    ("name", "counts", "total"),
    [
        ("other", [1] * (len(BOUNDS[PUSH]) + 1), 1.0),
        (PUSH, [1] * len(BOUNDS[PUSH]), 1.0),
        (PUSH, [-1] * (len(BOUNDS[PUSH]) + 1), 1.0),
        (PUSH, [1] * (len(BOUNDS[PUSH]) + 1), math.nan),
    ],
)
def test_a_histogram_of_another_kind_is_refused(name: str, counts: list[int], total: float) -> None:
    message = pb.ProcessStats(histograms=[pb.Histogram(name=name, counts=counts, sum=total)])
    with pytest.raises(WireError, match="known are"):
        Stats.from_message(message)
