"""Prometheus metrics of a process that serves a model; docs/serving.md lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elasticcb.process.stats import resident_bytes

if TYPE_CHECKING:
    from elasticcb.serving.served_model import ServedModel

_PREFIX = "elasticcb_serving_"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)


class ServingMetrics:
    """Attributes:
    registry: everything below, and the state of the model.
    """

    def __init__(self, model: ServedModel) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_ModelCollector(model))
        self.requests = Counter(
            f"{_PREFIX}requests", "Requests to predict, by protocol and status.", ["protocol", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            f"{_PREFIX}request_duration_seconds", "Time from the whole request to its answer.", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.batches = Histogram(
            f"{_PREFIX}batch_requests", "Requests that ran as one batch.", buckets=_REQUESTS, registry=self.registry
        )


class _ModelCollector(Collector):
    """What is served, at each scrape."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        text = "1: the wanted version can't be served, the log has the reason; 0: it is served."
        yield _gauge("problem", text, bool(self._model.problem))
        yield _gauge("resident_memory_bytes", "Resident memory of the process (Linux).", resident_bytes())
        export, age = self._model.export, self._model.age
        if export is None or age is None:
            return
        yield _gauge("version", "The served version.", export.version)
        yield _gauge("version_age_seconds", "Time since the served version was written.", age)
        rows = GaugeMetricFamily(f"{_PREFIX}table_rows", "Rows of an embedding table.", labels=["table"])
        for path, count in self._model.rows.items():
            rows.add_metric([path], count)
        yield rows


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}{name}", text, value=value)
