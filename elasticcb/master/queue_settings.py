"""Settings of a task queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticcb.errors import UsageError
from elasticcb.master.shards import ShardLayout


@dataclass(frozen=True)
class QueueSettings:
    """Settings of a task queue.

    Attributes:
        records_per_task: records per task; fewer at the end of a source.
        minibatch_size: records per batch, for `max_batches`.
        max_batches: exact number of training batches to hand out, if the sources have that many; 0: no limit. A range
            that is handed out again does not count again.
        shuffle_seed: epoch e is shuffled by `random.Random(f"{shuffle_seed}/{e}")`; None: no shuffling.
        max_retries: how often a task may fail; one more failure fails the job.
        lease_seconds: a worker without progress for this long times out; while it reports computing a batch,
            after twelve times as long.
        hold_epochs: epoch e + 1 begins only after `release_epoch(e)`. Without it, epochs overlap: epoch e + 1 begins
            when all tasks of epoch e are handed out.
        max_losses: how many workers may be lost (or hang) on a task without progress on it; one more fails the job,
            because the task seems to kill them. The oldest lease of a lost worker is charged, because it was running
            that one.
        initial_epoch: earlier epochs count as done.
        open_ended: the number of records of an epoch is unknown: the sources' number is only an upper bound, and an
            epoch ends where a worker reports that the source ended.
        hold_predictions: a worker's predictions are safe only after `results_kept`, or when it leaves in order; if it
            is lost before, its prediction tasks are repeated.
        repeats_lost: training tasks are repeated whose updates a lost server had not saved.

    Raises `UsageError` for values out of range.
    """

    records_per_task: int
    minibatch_size: int
    num_epochs: int = 1
    max_batches: int = 0
    shuffle_seed: int | None = 0
    max_retries: int = 3
    lease_seconds: float = 300.0
    hold_epochs: bool = False
    max_losses: int = 10
    initial_epoch: int = 0
    open_ended: bool = False
    hold_predictions: bool = False
    repeats_lost: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("num_epochs", 1),
            ("max_batches", 0),
            ("max_retries", 0),
            ("max_losses", 0),
            ("initial_epoch", 0),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)} is invalid: must be at least {least}.")
        if self.lease_seconds <= 0:
            raise UsageError(f"lease_seconds={self.lease_seconds} is invalid: must be more than 0.")

    def layout(self, sources: Sequence[tuple[str, int]]) -> ShardLayout:
        return ShardLayout(sources, self.records_per_task, self.minibatch_size)
