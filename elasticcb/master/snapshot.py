"""The state of a job at one moment, which all displays render.

`observation.py` creates it. The terminal, the summary and the metrics read its fields; `elasticcb status`, the
dashboard and `status.json` its JSON document, whose keys are the fields.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from elasticcb.clients.history import finite
from elasticcb.errors import ElasticCBError, JobInterrupted, UsageError, describe
from elasticcb.settings import Command

if TYPE_CHECKING:
    from elasticcb.process.stats import Histogram, TableSize


@dataclass(frozen=True, kw_only=True)
class SavedModelInput:
    """One input of the exported model's `serving_default` signature."""

    name: str
    dtype: str  # NumPy name: "float32"; "string" for text
    shape: tuple[int | None, ...]  # None: any size, such as the batch axis


@dataclass(frozen=True, kw_only=True)
class ProcessSnapshot:
    """A slot of the job, and the process in it; None: no process, or no value reported."""

    role: str  # "worker" or "ps"
    index: int
    state: str  # "planned", "requested", "up", …
    id: int | None = None
    pid: int | None = None
    host: str | None = None
    address: str | None = None
    straggler: bool = False  # a worker much slower than the others
    cpu_seconds: float | None = None
    resident_bytes: int | None = None
    certificate_expires: float = 0.0  # as below
    batches: int | None = None  # batches trained by a worker
    records_per_second: float | None = None  # recent rate of a worker
    seconds_per_batch: float | None = None  # median of a worker
    tables: Mapping[str, TableSize] = field(default_factory=dict)  # tables of a server, by variable path


@dataclass(frozen=True, kw_only=True)
class ProcessCounts:
    """Number of workers or parameter servers."""

    planned: int = 0
    up: int = 0
    lost: int = 0  # over the whole job
    replaced: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """A finished epoch, with its evaluation pass if any."""

    epoch: int  # from 1
    epochs: int  # planned; 0: without end
    seconds: float  # of training
    # batches trained by all workers in that time, including those of the next epoch; 0: under another master
    steps: int
    logs: Mapping[str, Any]  # of `on_epoch_end`: loss and metrics, and those of the round as "val_..."

    @property
    def text(self) -> str:
        """For a log: "Epoch 2/4 is done in 12.3 s: loss 0.6550"."""
        values = ", ".join(f"{name} {format_metric(value)}" for name, value in self.logs.items())
        return f"Epoch {of_epochs(self.epoch, self.epochs)} is done in {self.seconds:.1f} s: {values}"


@dataclass(frozen=True, kw_only=True)
class PartitionLag:
    """How far training is behind a partition of a stream."""

    offset: int  # before which all records are trained
    records: int  # that are there from it on
    seconds: float  # since the first of these came; 0: there is none, or the source does not say


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """The job at one moment. Unknown or inapplicable fields have their defaults. docs/operations.md lists them."""

    command: Command | None = None  # None: no job yet
    name: str = ""
    directory: str = ""
    phase: str = "starting"  # current activity: "training", "evaluating"; at the end one of `_ENDS`
    error: str = ""  # that ended the job; "": none
    error_type: str = ""  # its class
    ready: bool = False  # the servers hold the model and tasks are handed out
    seconds: float = 0.0  # since the job started
    seconds_left: float | None = None  # estimate
    seconds_to_first_step: float | None = None  # since the start of the command
    epoch: int = 0  # current epoch, from 1; 0: none yet, or not training
    epochs: int = 0  # planned; 0: without end, or not training
    version: int = 0
    loss: float | None = None  # mean over the last batches
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation pass
    stopped_early: str = ""  # why training ended before its last epoch; "": it did not
    records_per_epoch: tuple[int, ...] = ()  # trained records of each epoch, counted once each
    records_total: int = 0  # to train over all epochs; 0: unknown
    records_per_second: float = 0.0  # recent rate
    records_evaluated: int = 0  # in the last evaluation pass, counted once each
    records_evaluated_before: int = 0  # in earlier rounds
    records_predicted: int = 0  # counted once each
    records_repeated: int = 0  # upper bound of records trained or predicted more than once, after losing workers
    stream: Mapping[str, PartitionLag] = field(default_factory=dict)  # by partition; {}: the data does not grow
    records_lost: int = 0  # of the stream, removed before they were trained
    rows_looked_up: int = 0  # of embedding tables
    tables: Mapping[str, TableSize] = field(default_factory=dict)  # over all servers, by variable path
    tasks: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by type and state: ("training", "todo")
    tasks_retried: int = 0
    tasks_taken_over: int = 0
    tasks_split: int = 0  # times a worker handed the rest of its task to an idle worker
    reports_refused: int = 0  # for tasks that had been reassigned
    batches_skipped: int = 0  # NaN or infinity, with --non_finite=skip
    bad_records: int = 0  # that could not be converted, with --bad_records
    callback_errors: int = 0  # with --callback_errors=warn
    checkpoints_failed: int = 0  # that could not be written; training continued
    # seconds since the newest checkpoint, or the start; None: no regular checkpoints
    checkpoint_age_seconds: float | None = None
    export_path: str = ""  # folder or URL of PeriodicExport; "": nothing was exported yet
    export_version: int = 0  # of the newest export there; 0: none
    export_age_seconds: float | None = None  # since it was complete; None: there is none
    recovery_files_failed: int = 0  # failed writes of servers; training continued
    free_disk_bytes: Mapping[str, int] = field(default_factory=dict)  # of the folders "job" and "checkpoint", if local
    refused_calls: Mapping[str, int] = field(default_factory=dict)  # by master and servers, by reason (text)
    workers: ProcessCounts = ProcessCounts()
    servers: ProcessCounts = ProcessCounts()
    servers_restoring: int = 0  # lost servers whose replacements don't hold the model yet
    longest_recovery_seconds: float = 0.0  # of a server, from a loss until the replacement held its part
    updates_lost: int = 0  # updates to the parts of lost servers
    stragglers: tuple[int, ...] = ()  # indexes of workers much slower than the others
    stragglers_ever: tuple[int, ...] = ()  # indexes of workers that were stragglers at any time
    processes: tuple[ProcessSnapshot, ...] = ()
    cpu_seconds: float = 0.0  # of the master
    resident_bytes: int = 0  # of the master; 0: unknown
    certificate_expires: float = 0.0  # of the master, in seconds since the epoch; 0: it has none
    histograms: Mapping[str, Histogram] = field(default_factory=dict)  # over all processes, by name
    saved_model_path: str = ""  # "": nothing was exported
    saved_model_inputs: tuple[SavedModelInput, ...] = ()  # (): unknown, the summary shows how to list them
    predictions_path: str = ""  # "": predictions went only to callbacks
    checkpoint_path: str = ""  # newest checkpoint; "": none
    # of workers' calls to all servers, by name: "calls", "mean_seconds", "p95_seconds"
    latencies: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @property
    def records_trained(self) -> int:
        """Over all epochs."""
        return sum(self.records_per_epoch)

    @property
    def lag_records(self) -> int:
        """Over all partitions of a stream."""
        return sum(lag.records for lag in self.stream.values())

    @property
    def lag_seconds(self) -> float:
        """Of the partition that is most behind."""
        return max((lag.seconds for lag in self.stream.values()), default=0.0)

    @property
    def tasks_by_state(self) -> Mapping[str, int]:
        """Over all types: "todo", "doing", …; 0 for others."""
        counts: Counter[str] = Counter()
        for (_, state), count in self.tasks.items():
            counts[state] += count
        return counts

    @property
    def conditions(self) -> list[dict[str, str]]:
        """In the form of Kubernetes conditions."""
        over, failed = self.phase in _ENDS, bool(self.error_type)
        counts = {
            "workers missing": self.workers.planned - self.workers.up,
            "parameter servers missing": self.servers.planned - self.servers.up,
            "parameter servers restoring": self.servers_restoring,
            "workers straggling": len(self.stragglers),
        }
        troubles = [f"{what}: {count}" for what, count in counts.items() if count > 0] if self.ready else []

        def condition(kind: str, holds: bool, reason: str, message: str = "") -> dict[str, str]:
            return {"type": kind, "status": str(holds), "reason": reason, "message": message}

        return [
            condition("Ready", self.ready, "TasksAreHandedOut" if self.ready else "JobIsOver" if over else "JobStarts"),
            condition("Degraded", bool(troubles), "Processes" if troubles else "AsExpected", ", ".join(troubles)),
            condition("Complete", over and not failed, "JobIsOver" if over else "JobRuns"),
            condition("Failed", failed, self.error_type or "NoError", self.error.partition("\n")[0]),
        ]

    def ended(self, error: BaseException | None) -> JobSnapshot:
        """At the end of the job; `error` ended it, None: it succeeded."""
        interrupted = isinstance(error, (JobInterrupted, KeyboardInterrupt, SystemExit))
        return replace(
            self,
            phase="done" if error is None else "interrupted" if interrupted else "failed",
            error="" if error is None else str(error) if isinstance(error, ElasticCBError) else describe(error),
            error_type="" if error is None else type(error).__name__,
            ready=False,
            seconds_left=None,
            records_per_second=0.0,
            checkpoint_age_seconds=None,
            export_age_seconds=None,
        )

    def to_json(self) -> dict[str, Any]:
        """The document: the fields as JSON values, and what follows from them; numbers that JSON lacks are null."""
        tasks: dict[str, dict[str, int]] = {}
        for (kind, state), count in self.tasks.items():
            tasks.setdefault(kind, {})[state] = count
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "histograms"}
        computed = {
            "records_trained": self.records_trained,
            "conditions": self.conditions,
            "lag_records": self.lag_records,
            "lag_seconds": self.lag_seconds,
        }
        document: dict[str, Any] = _json({**shown, "tasks": tasks, **computed})
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> JobSnapshot:
        """The snapshot of a document, without processes, tables and histograms. Raises `UsageError`."""
        left_out = {"processes", "tables", "histograms", "saved_model_inputs"}
        try:
            values = {each.name: document[each.name] for each in fields(cls) if each.name not in left_out}
            for each in fields(cls):
                kind = str if isinstance(each.default, str) else (int, float, type(None))
                if isinstance(each.default, (str, int, float)) and not isinstance(values[each.name], kind):
                    raise TypeError(f"{each.name} is {values[each.name]!r}")
            return cls(**values | {
                "command": Command(values["command"]) if values["command"] else None,
                "metrics": {name: value for name, value in values["metrics"].items() if value is not None},
                "tasks": {(kind, state): n for kind, states in values["tasks"].items() for state, n in states.items()},
                "workers": ProcessCounts(**values["workers"]),
                "stream": {name: PartitionLag(**lag) for name, lag in values["stream"].items()},
                "servers": ProcessCounts(**values["servers"]),
            })  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"The job's state can't be read ({error!r}): it was changed, or another release wrote it."
            ) from error


_ENDS = ("done", "interrupted", "failed")


def _json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "_asdict"):  # a named tuple
        return value._asdict()
    if is_dataclass(value):
        return {each.name: _json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _json(each) for name, each in value.items()}
    return [_json(each) for each in value] if isinstance(value, (tuple, list)) else finite(value)


def of_epochs(epoch: int, epochs: int) -> str:
    """ "3/10"; "3" without end."""
    return f"{epoch}/{epochs}" if epochs else str(epoch)


def format_metric(value: Any) -> str:
    """A loss or a metric, formatted like Keras: 0.1234, or 0.0001234."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"
