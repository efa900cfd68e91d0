"""What a job looks like from outside: while it runs (`JobStatus`) and when it is over (`Summary`).

Plain data, made by the master and shown by the command line; see docs/cli.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticcb.settings import Command


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One moment of a running job."""

    command: Command
    phase: str  # what it does now, one or two words: "starting", "training", "evaluating"
    epoch: int = 0  # the one under way, counted from 1; 0: none yet, or not training
    epochs: int = 0  # planned; 0: not training
    records_done: int = 0  # over all epochs
    records_total: int = 0  # over all epochs; 0: not known yet
    records_evaluated: int = 0  # in the last evaluation round, so far
    records_predicted: int = 0  # so far
    records_per_second: float = 0.0  # of late
    version: int = 0
    loss: float | None = None  # mean over the last batches
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation round
    workers_up: int = 0
    workers_planned: int = 0
    stragglers: tuple[int, ...] = ()  # places of workers that are much slower than the others
    ps_up: int = 0
    ps_planned: int = 0
    tasks_todo: int = 0
    tasks_doing: int = 0
    seconds_left: float | None = None  # an estimate; None: not known yet


@dataclass(frozen=True, kw_only=True)
class SavedModelInput:
    """One input of the exported model's `serving_default` signature."""

    name: str
    dtype: str  # NumPy's name: "float32"; "string" for text
    shape: tuple[int | None, ...]  # None: any size, as the batch axis


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The exact accounting of a job that is over."""

    command: Command
    seconds: float
    records_per_epoch: tuple[int, ...] = ()  # training records of each epoch, every record counted once
    records_evaluated: int = 0  # in the last evaluation round, each exactly once
    records_predicted: int = 0  # each counted once
    records_repeated: int = 0  # trained or predicted more than once: at most so many, after workers were lost
    tasks_retried: int = 0
    gradients_rejected: int = 0  # too old, computed again on fresh weights (synchronous mode)
    batches_skipped: int = 0  # NaN or infinity in loss or gradients, with --non_finite=skip
    callback_errors: int = 0  # that the job went on after, with --callback_errors=warn
    refused_calls: Mapping[str, int] = field(default_factory=dict)  # by master and servers, by reason in words
    workers_lost: int = 0
    workers_replaced: int = 0
    stragglers: tuple[int, ...] = ()  # places of workers that were much slower than the others, for a time at least
    tasks_split: int = 0  # times that one worker gave the end of its task to another that waited
    servers_lost: int = 0
    servers_replaced: int = 0
    longest_server_recovery: float = 0.0  # seconds from a loss to the moment when another server held its part
    updates_lost: int = 0  # with lost servers, of their parts of the model
    version: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation round
    stopped_early: str = ""  # why training ended before its last epoch; "": it did not
    seconds_to_first_step: float | None = None  # from the start of the command
    saved_model_path: str = ""  # "": nothing was exported
    saved_model_inputs: tuple[SavedModelInput, ...] = ()  # (): not known, the summary shows how to see them
    predictions_path: str = ""  # "": they went to callbacks alone
    checkpoint_path: str = ""  # newest one; "": none was written
    checkpoints_failed: int = 0  # that could not be written; training went on
    job_directory: str = ""
    log_files: tuple[str, ...] = ()
