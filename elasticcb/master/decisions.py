"""Answers of the task queue: decisions with their reasons, and the milestones of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticcb.master.task import Lease, Task


class DecisionKind(str, Enum):
    """Kinds of answers to `get_task`."""

    TASK = "TASK"  # a task
    WAIT = "WAIT"  # none now; maybe later
    FINISHED = "FINISHED"  # none, ever again


@dataclass(frozen=True, slots=True)
class TaskDecision:
    """The answer to `get_task`; `lease` is set when `kind` is TASK."""

    kind: DecisionKind
    lease: Lease | None
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a worker may continue its lease, and why (not).

    With `long_batch`, the reason is to be shown to the user as a warning about the worker.
    """

    accepted: bool
    reason: str
    long_batch: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a report. `task` is the reported task; None when the report was refused.

    A `duplicate` repeats an accepted report and has no effect: don't count its metrics.
    """

    accepted: bool
    reason: str
    task: Task | None = None
    duplicate: bool = False
    ends_pass: bool = False  # a milestone was reached

    @property
    def counts(self) -> bool:
        """Whether the reported results count."""
        return self.accepted and not self.duplicate and self.task is not None


class MilestoneKind(str, Enum):
    """Kinds of milestones."""

    EPOCH_DONE = "EPOCH_DONE"  # `number` is the epoch; in rising order
    TRAINING_DONE = "TRAINING_DONE"  # after the last EPOCH_DONE
    ROUND_DONE = "ROUND_DONE"  # `number` is the evaluation pass
    PREDICTION_DONE = "PREDICTION_DONE"
    TRAIN_END_DONE = "TRAIN_END_DONE"


@dataclass(frozen=True, slots=True)
class Milestone:
    """A one-time event that the master acts on."""

    kind: MilestoneKind
    number: int = 0
