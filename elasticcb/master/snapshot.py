"""What a job looks like at one moment: everything that people and machines are shown of it is told from this alone.

`observation.py` makes it; the display, the summary, `elasticcb status --json` and the metrics read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticcb.settings import Command

if TYPE_CHECKING:
    from elasticcb.process.stats import Histogram, TableSize


@dataclass(frozen=True, kw_only=True)
class SavedModelInput:
    """One input of the exported model's `serving_default` signature."""

    name: str
    dtype: str  # NumPy's name: "float32"; "string" for text
    shape: tuple[int | None, ...]  # None: any size, as the batch axis


@dataclass(frozen=True, kw_only=True)
class ProcessSnapshot:
    """A place of the job, and the process in it; None: there is none, or it has not told."""

    role: str  # "worker" or "ps"
    index: int
    state: str  # "planned", "requested", "up", …
    id: int | None = None
    pid: int | None = None
    host: str | None = None
    address: str | None = None
    straggler: bool = False  # a worker that is much slower than the others
    cpu_seconds: float | None = None
    resident_bytes: int | None = None
    certificate_expires: float = 0.0  # as below
    batches: int | None = None  # of a worker, that it has trained on
    records_per_second: float | None = None  # of a worker that trains, of late
    seconds_per_batch: float | None = None  # likewise, a median
    tables: Mapping[str, TableSize] = field(default_factory=dict)  # of a server, by the path of the variable


@dataclass(frozen=True, kw_only=True)
class ProcessCounts:
    """How many workers, or parameter servers, there are."""

    planned: int = 0
    up: int = 0
    lost: int = 0  # over the whole job
    replaced: int = 0


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """One moment of a job. What is not known yet, or does not apply, is as by default."""

    command: Command | None = None  # None: there is no job yet
    name: str = ""
    directory: str = ""
    phase: str = "starting"  # what it does now, one or two words: "training", "evaluating"
    ready: bool = False  # the servers hold the model, and tasks are handed out
    seconds: float = 0.0  # since the job began
    seconds_left: float | None = None  # an estimate
    seconds_to_first_step: float | None = None  # from the start of the command
    epoch: int = 0  # the one under way, counted from 1; 0: none yet, or not training
    epochs: int = 0  # planned; 0: not training
    version: int = 0
    loss: float | None = None  # mean over the last batches
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation round
    stopped_early: str = ""  # why training ended before its last epoch; "": it did not
    records_per_epoch: tuple[int, ...] = ()  # training records of each epoch, every record counted once
    records_total: int = 0  # to train over all epochs; 0: not known yet
    records_per_second: float = 0.0  # of late
    records_evaluated: int = 0  # in the last evaluation round, each exactly once
    records_evaluated_before: int = 0  # in the rounds before
    records_predicted: int = 0  # each counted once
    records_repeated: int = 0  # trained or predicted more than once: at most so many, after workers were lost
    rows_looked_up: int = 0  # of embedding tables
    tables: Mapping[str, TableSize] = field(default_factory=dict)  # of all servers, by the path of the variable
    tasks: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by type and state: ("training", "todo")
    tasks_retried: int = 0
    tasks_taken_over: int = 0
    tasks_split: int = 0  # times that one worker gave the end of its task to another that waited
    reports_refused: int = 0  # on tasks that had been taken away
    gradients_rejected: int = 0  # too old, computed again on fresh weights (synchronous mode)
    batches_skipped: int = 0  # NaN or infinity in loss or gradients, with --non_finite=skip
    callback_errors: int = 0  # that the job went on after, with --callback_errors=warn
    checkpoints_failed: int = 0  # that could not be written; training went on
    checkpoint_age: float | None = None  # seconds since the newest one, or the start; None: none is due at intervals
    recovery_files_failed: int = 0  # times that a server could not write them; training went on
    free_disk_bytes: Mapping[str, int] = field(default_factory=dict)  # of the folders "job" and "checkpoint", on disks
    refused_calls: Mapping[str, int] = field(default_factory=dict)  # by master and servers, by reason in words
    workers: ProcessCounts = ProcessCounts()
    servers: ProcessCounts = ProcessCounts()
    servers_restoring: int = 0  # that were lost, in whose places no other holds the model yet
    longest_server_recovery: float = 0.0  # seconds from a loss to the moment when another server held its part
    updates_lost: int = 0  # with lost servers, of their parts of the model
    stragglers: tuple[int, ...] = ()  # places of workers that are much slower than the others
    stragglers_ever: tuple[int, ...] = ()  # places of workers that were so for a time at least
    processes: tuple[ProcessSnapshot, ...] = ()
    cpu_seconds: float = 0.0  # of the master
    resident_bytes: int = 0  # of the master; 0: not known
    certificate_expires: float = 0.0  # that of the master, in seconds since the epoch; 0: it has none
    histograms: Mapping[str, Histogram] = field(default_factory=dict)  # of all processes, by name
    saved_model_path: str = ""  # "": nothing was exported
    saved_model_inputs: tuple[SavedModelInput, ...] = ()  # (): not known, the summary shows how to see them
    predictions_path: str = ""  # "": they went to callbacks alone
    checkpoint_path: str = ""  # newest one; "": none was written
    log_files: tuple[str, ...] = ()  # when it is over

    @property
    def records_trained(self) -> int:
        """Over all epochs."""
        return sum(self.records_per_epoch)

    @property
    def tasks_by_state(self) -> Mapping[str, int]:
        """Of all types: "todo", "doing", …; 0 for others."""
        counts: Counter[str] = Counter()
        for (_, state), count in self.tasks.items():
            counts[state] += count
        return counts
