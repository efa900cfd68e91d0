"""What a task queue says: decisions and answers, with their reasons, and the milestones of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticcb.master.task import Lease, Task


class DecisionKind(str, Enum):
    """The answers to `get_task`."""

    TASK = "TASK"  # here is one
    WAIT = "WAIT"  # none now; there may be one later
    FINISHED = "FINISHED"  # there will never be one again


@dataclass(frozen=True, slots=True)
class TaskDecision:
    """The answer to `get_task`; `lease` is set when `kind` is TASK."""

    kind: DecisionKind
    lease: Lease | None
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a worker may go on with its lease, and why (not).

    After a `long_batch`, which the user should know of, the reason is what to tell them of the worker.
    """

    accepted: bool
    reason: str
    long_batch: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a report. `task` is the task reported on, None when the report was refused.

    A `duplicate` repeats a report that was accepted before, and has no effect: don't count its metrics.
    """

    accepted: bool
    reason: str
    task: Task | None = None
    duplicate: bool = False

    @property
    def counts(self) -> bool:
        """Whether what the report brought is to be counted."""
        return self.accepted and not self.duplicate and self.task is not None


class MilestoneKind(str, Enum):
    """What a queue can have reached."""

    EPOCH_DONE = "EPOCH_DONE"  # `number` is the epoch; in rising order
    TRAINING_DONE = "TRAINING_DONE"  # after the last EPOCH_DONE
    ROUND_DONE = "ROUND_DONE"  # `number` is the evaluation round
    PREDICTION_DONE = "PREDICTION_DONE"
    TRAIN_END_DONE = "TRAIN_END_DONE"


@dataclass(frozen=True, slots=True)
class Milestone:
    """Something that happens once and that the master acts on."""

    kind: MilestoneKind
    number: int = 0
