"""The job's Prometheus metrics, collected at each scrape; docs/metrics.md lists them."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, product
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elasticcb.master.members import PlaceState, Role
from elasticcb.master.snapshot import JobSnapshot, ProcessCounts
from elasticcb.process.stats import LOOKUP, PULL, PUSH, STALENESS, Histogram
from elasticcb.rpc.admission import Refusal

_Value = float | int
_Labelled = Mapping[Any, _Value]  # by label values, a tuple


class JobCollector(Collector):
    """Exports the job snapshot that `observe` returns at each scrape."""

    def __init__(self, observe: Callable[[], JobSnapshot]) -> None:
        self._observe = observe

    def collect(self) -> Iterator[Metric]:
        seen = self._observe()
        yield from _job(seen)
        yield from _tasks(seen)
        yield from _processes(seen)
        yield from _calls(seen)


def _job(seen: JobSnapshot) -> Iterator[Metric]:
    if seen.command is not None:
        job = seen.name, seen.command.value
        yield _gauge("job_info", "1: the current job.", {job: 1}, ("name", "command"))
    yield _gauge("ready", "1 when the servers hold the model and tasks are handed out, else 0.", int(seen.ready))
    if seen.command is not None:
        yield _gauge("model_version", "Updates applied to the model.", seen.version)
        yield _gauge("epoch", "The current epoch, from 1; 0: none.", seen.epoch)
        yield _gauge("epochs", "Epochs to train; 0: without end, or the job does not train.", seen.epochs)
        if seen.loss is not None:
            yield _gauge("training_loss", "Mean over the batches of a worker's last report.", seen.loss)
        values = {(name,): value for name, value in seen.metrics.items() if isinstance(value, (int, float))}
        yield _gauge("evaluation_metric", "Metrics of the last evaluation pass.", values, ("metric",))
        yield _gauge("stragglers", "Workers that are much slower than the others.", len(seen.stragglers))
    yield _gauge("records_planned", "Records to train over all epochs; 0: not known.", seen.records_total)
    records = {
        ("training",): seen.records_trained,
        ("evaluation",): seen.records_evaluated + seen.records_evaluated_before,
        ("prediction",): seen.records_predicted,
    }
    yield _counter("records", "Records that workers reported as done, counted once each.", records, ("type",))
    behind = {(name,): lag.records for name, lag in seen.stream.items()}
    yield _gauge("stream_lag_records", "Records of a stream that are there and not trained.", behind, ("partition",))
    seconds = {(name,): lag.seconds for name, lag in seen.stream.items()}
    text = "Time since the oldest of these records came; 0: there is none."
    yield _gauge("stream_lag_seconds", text, seconds, ("partition",))
    yield _counter("records_lost", "Records of a stream that were removed before they were trained.", seen.records_lost)
    repeated = seen.records_repeated
    yield _counter("records_repeated", "Records trained or predicted more than once (upper bound).", repeated)
    yield _counter("batches_skipped", "Batches skipped because of NaN or infinity.", seen.batches_skipped)
    yield _counter("bad_records", "Records that could not be converted, and were skipped.", seen.bad_records)
    yield _counter("callback_errors", "Callback errors after which the job continued.", seen.callback_errors)
    yield _counter("checkpoints_failed", "Checkpoints that could not be written.", seen.checkpoints_failed)
    age = {} if seen.checkpoint_age_seconds is None else {(): seen.checkpoint_age_seconds}
    text = "Time since the newest checkpoint, or since the job started; only with checkpoint_steps."
    yield _gauge("checkpoint_age_seconds", text, age)
    age = {} if seen.export_age_seconds is None else {(): seen.export_age_seconds}
    yield _gauge("export_age_seconds", "Time since the newest export for serving was complete.", age)
    unwritten = seen.recovery_files_failed
    yield _counter("recovery_files_failed", "Times that a server could not write its recovery files.", unwritten)
    free = {(folder,): size for folder, size in seen.free_disk_bytes.items()}
    text = "Free space on the disks of the job's folders; a remote folder has none."
    yield _gauge("free_disk_bytes", text, free, ("folder",))
    yield _counter("updates_lost", "Updates lost with parameter servers.", seen.updates_lost)


def _tasks(seen: JobSnapshot) -> Iterator[Metric]:
    yield _gauge("tasks", "Tasks by state; todo includes tasks not yet created.", seen.tasks, ("type", "state"))
    taken_over = seen.tasks_taken_over
    text = "Times a task was requeued because its worker was lost, hung, or was asked to stop."
    yield _counter("tasks_taken_over", text, taken_over)
    retried = seen.tasks_retried
    yield _counter("tasks_retried", "Times a task was retried after its worker reported a failure.", retried)
    yield _counter("tasks_split", "Times a worker handed the rest of its task to an idle one.", seen.tasks_split)
    yield _counter("reports_refused", "Reports refused because the task had been reassigned.", seen.reports_refused)


def _processes(seen: JobSnapshot) -> Iterator[Metric]:
    states = Counter((process.role, process.state) for process in seen.processes)
    counts = {place: states[place] for place in product(_labels(Role), _labels(PlaceState))}
    yield _gauge("processes", "Workers and parameter servers by state.", counts, ("role", "state"))
    by_role: dict[str, ProcessCounts] = {Role.WORKER.label: seen.workers, Role.PS.label: seen.servers}
    lost = {(role,): counts.lost for role, counts in by_role.items()}
    yield _counter("processes_lost", "Processes lost.", lost, ("role",))
    replaced = {(role,): counts.replaced for role, counts in by_role.items()}
    yield _counter("recoveries", "Processes that replaced a lost one.", replaced, ("role",))
    restoring = seen.servers_restoring
    yield _gauge(
        "parameter_servers_restoring", "Parameter servers whose part of the model is being restored.", restoring
    )
    cpu: dict[tuple[str, str], _Value] = {("master", "0"): seen.cpu_seconds}
    memory: dict[tuple[str, str], _Value] = {("master", "0"): seen.resident_bytes}
    expiry = {("master", "0"): seen.certificate_expires}
    for process in seen.processes:
        expiry[process.role, str(process.index)] = process.certificate_expires
        if process.cpu_seconds is not None:
            labels = process.role, str(process.index)
            cpu[labels], memory[labels] = process.cpu_seconds, process.resident_bytes or 0
    yield _counter("cpu_seconds", "CPU time of the process since it started.", cpu, ("role", "index"))
    known = {labels: size for labels, size in memory.items() if size}
    left = {labels: expires - time.time() for labels, expires in expiry.items() if expires}
    text = "Time until the certificate of a process expires, with TLS."
    yield _gauge("certificate_expiry_seconds", text, left, ("role", "index"))
    text = "Resident memory of a process, including shared memory (Linux)."
    yield _gauge("resident_memory_bytes", text, known, ("role", "index"))


def _calls(seen: JobSnapshot) -> Iterator[Metric]:
    rows = {(path,): size.rows for path, size in seen.tables.items()}
    yield _gauge("table_rows", "Rows of an embedding table, on all servers, at most 10 s ago.", rows, ("table",))
    held = {(path,): size.bytes for path, size in seen.tables.items()}
    yield _gauge("table_bytes", "Memory of an embedding table, including slots, counts and index.", held, ("table",))
    yield _counter("lookup_rows", "Embedding rows looked up by workers.", seen.rows_looked_up)
    exchanges = {call: seen.histograms[call] for call in (PUSH, PULL, LOOKUP)}
    text = "Duration of a worker's calls to all servers. A push also pulls the new weights, so there are few pulls."
    yield _histogram("exchange_duration_seconds", text, exchanges, "call")
    text = "Batches of other workers that were merged between two merges of a worker."
    yield _histogram("staleness_versions", text, {"": seen.histograms[STALENESS]})
    refused = {(reason.name.lower(),): seen.refused_calls.get(reason.value, 0) for reason in Refusal}
    yield _counter("refused_calls", "Calls refused by the master and the servers.", refused, ("reason",))


def _labels(kind: type[Role | PlaceState]) -> list[str]:
    return [each.label for each in kind]


def _metric(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    values: _Value | _Labelled,
    labels: tuple[str, ...] = (),
) -> Metric:
    metric = kind(f"elasticcb_{name}", text, labels=labels)
    for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
        metric.add_metric(key, value)
    return metric


_gauge = functools.partial(_metric, GaugeMetricFamily)
_counter = functools.partial(_metric, CounterMetricFamily)


def _histogram(name: str, text: str, values: Mapping[str, Histogram], label: str = "") -> Metric:
    metric = HistogramMetricFamily(f"elasticcb_{name}", text, labels=[label] if label else [])
    for key, histogram in values.items():
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        metric.add_metric([key] if label else [], buckets, histogram.sum)
    return metric
