"""The job's Prometheus metrics, collected at each scrape (docs/metrics.md lists them), and the server for scrapes and
for liveness and readiness checks.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, product
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elasticcb.errors import UsageError
from elasticcb.master.members import PlaceState, Role
from elasticcb.master.snapshot import JobSnapshot, ProcessCounts
from elasticcb.process.stats import LOOKUP, PULL, PUSH, STALENESS, Histogram
from elasticcb.rpc.admission import Refusal
from elasticcb.rpc.services import LIVE_PATH, READY_PATH

_MOST_CONNECTIONS = 32
_QUIET_SECONDS = 5.0  # timeout between two parts of a request

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


class _Handler(WSGIRequestHandler):
    timeout = _QUIET_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    """One thread per connection; at the limit, the oldest connection is closed to serve a new one."""

    daemon_threads = True
    # connections waiting for a thread; with the default 5, a scrape waits for seconds during a flood
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections: deque[socket.socket] = deque()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        if len(self._connections) > _MOST_CONNECTIONS:
            with contextlib.suppress(OSError):  # already closed
                self._connections.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client is gone, or timed out."""


class MetricsServer:
    """Answers scrapes, in its own threads, and the checks at `LIVE_PATH` and `READY_PATH`.

    Raises `UsageError` when the port is taken.
    """

    def __init__(self, observe: Callable[[], JobSnapshot], ready: Callable[[], bool], host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(JobCollector(observe))
        try:
            self._server = _Server(host.strip("[]"), port)
        except OSError as error:
            raise UsageError(
                f"Could not serve metrics on {host}:{port}: {error}. Choose another metrics_port, or 0 for any that "
                "is free."
            ) from error
        self._metrics = make_wsgi_app(registry)
        self._checks: dict[str, Callable[[], bool]] = {LIVE_PATH: lambda: True, READY_PATH: ready}
        self._server.set_app(self._answer)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        check = self._checks.get(environ["PATH_INFO"])
        if check is None:
            return self._metrics(environ, start_response)
        good = check()
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ok\n" if good else b"not ready\n"]

    def stop(self) -> None:
        """Ends running scrapes."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
