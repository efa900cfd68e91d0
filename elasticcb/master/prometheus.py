"""The job's metrics for Prometheus, read when they are asked for. docs/operations.md explains them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elasticcb.master.observation import Observation
from elasticcb.master.roster import PlaceState, Role
from elasticcb.process.stats import LOOKUP, PULL, PUSH, STALENESS, Histogram, resident_bytes
from elasticcb.rpc.admission import Refusal

_Value = float | int
_Labelled = Mapping[Any, _Value]  # by the values of the labels, a tuple


class JobCollector(Collector):
    """Shows the job that `observe` sees at each scrape."""

    def __init__(self, observe: Callable[[], Observation]) -> None:
        self._observe = observe

    def collect(self) -> Iterator[Metric]:
        seen = self._observe()
        yield from _job(seen)
        yield from _tasks(seen)
        yield from _processes(seen)
        yield from _calls(seen)


def _job(seen: Observation) -> Iterator[Metric]:
    status, accounting, totals = seen.status, seen.accounting, seen.totals
    if seen.settings is not None:
        job = seen.settings.name, seen.settings.command.value
        yield _gauge("job_info", "The present job.", {job: 1}, ("name", "command"))
    yield _gauge("ready", "1 when the servers hold the model and tasks are handed out, else 0.", int(seen.ready))
    if status is not None:
        yield _gauge("model_version", "Updates that the model has taken.", status.version)
        yield _gauge("epoch", "The epoch under way, from 1; 0: none.", status.epoch)
        yield _gauge("epochs", "Epochs that are planned; 0: the job does not train.", status.epochs)
        if status.loss is not None:
            yield _gauge("training_loss", "Mean over the batches of a worker's last report.", status.loss)
        values = {(name,): value for name, value in status.metrics.items() if isinstance(value, (int, float))}
        yield _gauge("evaluation_metric", "Metrics of the last evaluation round.", values, ("metric",))
        yield _gauge("stragglers", "Workers that are much slower than the others.", len(status.stragglers))
    yield _gauge(
        "records_planned",
        "Records to train over all epochs; 0: not known.",
        0 if status is None else status.records_total,
    )
    records = {
        ("training",): sum(accounting.records_trained.values()),
        ("evaluation",): accounting.records_evaluated,
        ("prediction",): accounting.records_predicted,
    }
    yield _counter("records", "Records that workers reported as done, each once.", records, ("type",))
    repeated = accounting.records_repeated
    yield _counter("records_repeated", "Records that were trained or predicted more than once, at most.", repeated)
    yield _counter("gradients_rejected", "Gradients that were too old, in synchronous mode.", totals.gradients_rejected)
    yield _counter("batches_skipped", "Batches with NaN or infinity that were passed over.", totals.batches_skipped)
    yield _counter("callback_errors", "Errors in callbacks that the job went on after.", totals.callback_errors)
    yield _counter("checkpoints_failed", "Checkpoints that could not be written.", totals.checkpoints_failed)
    yield _counter("updates_lost", "Updates that were lost with servers.", seen.recoveries.updates_lost)


def _tasks(seen: Observation) -> Iterator[Metric]:
    counts = {
        (kind.value.lower(), state.value.lower()): count
        for kind, states in seen.tasks.items()
        for state, count in states.items()
    }
    accounting = seen.accounting
    yield _gauge("tasks", "Tasks by state; todo holds those that are still to be made.", counts, ("type", "state"))
    taken_over = accounting.tasks_taken_over
    yield _counter("tasks_taken_over", "Times that a task went back since its worker was gone or hung.", taken_over)
    yield _counter(
        "tasks_retried", "Times that a worker failed in a task, and it was tried again.", accounting.tasks_retried
    )
    yield _counter("tasks_split", "Times that a worker gave the end of its task to another.", accounting.tasks_split)
    refused = accounting.reports_refused
    yield _counter("reports_refused", "Reports on tasks that had been taken away.", refused)


def _processes(seen: Observation) -> Iterator[Metric]:
    counts: dict[tuple[str, str], _Value] = {
        (_name(role), state.value.replace(" ", "_")): 0 for role in Role for state in PlaceState
    }
    for place in seen.places:
        counts[_name(place.role), place.state.value.replace(" ", "_")] += 1
    yield _gauge("processes", "Places of processes by state.", counts, ("role", "state"))
    lost = {(_name(role),): count for role, count in seen.lost.items()}
    yield _counter("processes_lost", "Processes that were lost.", lost, ("role",))
    replaced = {(_name(role),): count for role, count in seen.replaced.items()}
    yield _counter("recoveries", "Processes that took the place of a lost one.", replaced, ("role",))
    yield _gauge("parameter_servers_restoring", "Servers whose part of the model nobody serves now.", seen.restoring)
    cpu: dict[tuple[str, str], _Value] = {("master", "0"): time.process_time()}
    memory: dict[tuple[str, str], _Value] = {("master", "0"): resident_bytes()}
    for place in seen.places:
        if place.stats is not None:
            labels = _name(place.role), str(place.index)
            cpu[labels], memory[labels] = place.stats.cpu_seconds, place.stats.resident_bytes
    yield _counter("cpu_seconds", "Processor time of a process, since it started.", cpu, ("role", "index"))
    known = {labels: size for labels, size in memory.items() if size}
    yield _gauge("resident_memory_bytes", "Memory of a process, what it shares included.", known, ("role", "index"))


def _calls(seen: Observation) -> Iterator[Metric]:
    total = seen.added_up()
    yield _counter("lookup_rows", "Rows of embedding tables that workers asked for.", total.rows_looked_up)
    exchanges = {call: total.histograms[call] for call in (PUSH, PULL, LOOKUP)}
    text = "How long a worker's calls to all servers took; a push brings the weights after it along."
    yield _histogram("exchange_duration_seconds", text, exchanges, "call")
    text = "Versions that others made between the weights a gradient was computed on and its own update."
    yield _histogram("gradient_staleness_versions", text, {"": total.histograms[STALENESS]})
    refused = {(reason.name.lower(),): total.refused_calls.get(reason.value, 0) for reason in Refusal}
    yield _counter("refused_calls", "Calls that master and servers have refused.", refused, ("reason",))


def _name(role: Role) -> str:
    return role.name.lower()


def _gauge(name: str, text: str, values: _Value | _Labelled, labels: tuple[str, ...] = ()) -> Metric:
    metric = GaugeMetricFamily(f"elasticcb_{name}", text, labels=labels)
    for key, value in _labelled(values).items():
        metric.add_metric(key, value)
    return metric


def _counter(name: str, text: str, values: _Value | _Labelled, labels: tuple[str, ...] = ()) -> Metric:
    metric = CounterMetricFamily(f"elasticcb_{name}", text, labels=labels)
    for key, value in _labelled(values).items():
        metric.add_metric(key, value)
    return metric


def _labelled(values: _Value | _Labelled) -> _Labelled:
    return values if isinstance(values, Mapping) else {(): values}


def _histogram(name: str, text: str, values: Mapping[str, Histogram], label: str = "") -> Metric:
    metric = HistogramMetricFamily(f"elasticcb_{name}", text, labels=[label] if label else [])
    for key, histogram in values.items():
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        metric.add_metric([key] if label else [], buckets, histogram.sum)
    return metric
