"""The numbers by which a task queue works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticcb.errors import UsageError
from elasticcb.master.shards import ShardLayout


@dataclass(frozen=True)
class QueueSettings:
    """The numbers of a queue.

    Attributes:
        records_per_task: records of a task; fewer at the end of a source.
        minibatch_size: records of a batch, to count `max_batches` by.
        num_epochs: passes over the training sources.
        max_batches: training batches to hand out in all, exactly, if the sources have that many; 0 is
            no limit. A range that is handed out again does not count again.
        shuffle_seed: epoch e is in the order of `random.Random(f"{shuffle_seed}/{e}")`; None: in order.
        max_retries: a task may be reported failed so many times; one more fails the job.
        lease_seconds: a worker without progress for so long loses its leases; one that says that it is computing a
            batch, after twelve times as long.
        hold_epochs: epoch e + 1 begins only after `release_epoch(e)`. Without it, epochs overlap: when
            nothing of epoch e is left to hand out, epoch e + 1 begins.
        max_losses: so many workers may be lost (or hang) on a task without any progress on it; one more
            fails the job, for the task seems to kill them. Of a worker's leases the oldest is charged,
            for that is the one it was running.
        initial_epoch: epochs before it are taken as done.
        open_ended: nobody knows how many records an epoch has: the number of the sources is only an upper bound,
            and an epoch ends where a worker reports that the source did.
        hold_predictions: what a worker has predicted counts as safe only when `results_kept` says so, or when it
            leaves in order: if it is lost before, its prediction tasks are done again.

    Raises `UsageError` for numbers out of range.
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

    def __post_init__(self) -> None:
        for name, least in (
            ("num_epochs", 1),
            ("max_batches", 0),
            ("max_retries", 0),
            ("max_losses", 0),
            ("initial_epoch", 0),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        if self.lease_seconds <= 0:
            raise UsageError(f"lease_seconds is {self.lease_seconds}; expected more than 0 seconds.")

    def layout(self, sources: Sequence[tuple[str, int]]) -> ShardLayout:
        return ShardLayout(sources, self.records_per_task, self.minibatch_size)
