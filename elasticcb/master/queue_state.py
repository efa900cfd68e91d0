"""What a task queue knows, put together from its settings, and how that is saved in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from elasticcb.errors import CheckpointError, UsageError
from elasticcb.master.accounting import Accounting
from elasticcb.master.decisions import Milestone, MilestoneKind
from elasticcb.master.epochs import Epochs
from elasticcb.master.held_results import HeldResults
from elasticcb.master.leases import Leases
from elasticcb.master.shards import ShardLayout
from elasticcb.master.task import Task, TaskState, TaskType
from elasticcb.master.task_record import Failure, TaskRecord
from elasticcb.master.task_sources import EvaluationTasks, FunctionTasks, PredictionTasks, Supply, TrainEndTask
from elasticcb.master.todo import Todo

_FORMAT = 1

# Of what these bring about, the master's memory holds the rest: states of metrics, what to call.
_NOT_SAVED = frozenset({TaskType.EVALUATION, TaskType.FUNCTION})


@dataclass(frozen=True)
class QueueSettings:
    """The numbers that `TaskQueue` is given, which explains them.

    Raises `UsageError` for numbers out of range.
    """

    records_per_task: int
    minibatch_size: int
    num_epochs: int
    max_batches: int
    shuffle_seed: int | None
    max_retries: int
    lease_seconds: float
    hold_epochs: bool
    max_losses: int
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


class QueueState:
    """The tasks by their state (`todo`, `doing`, and `closed`, which only counts them), and the rest.

    A task that was made is in exactly one of the three.
    """

    def __init__(
        self, training: Sequence[tuple[str, int]], prediction: Sequence[tuple[str, int]], settings: QueueSettings
    ) -> None:
        self.settings = settings
        self.training_layout = settings.layout(training)
        self.prediction_layout = settings.layout(prediction)
        self.epochs = Epochs(
            self.training_layout,
            num_epochs=settings.num_epochs,
            max_batches=settings.max_batches,
            shuffle_seed=settings.shuffle_seed,
            hold=settings.hold_epochs,
            initial_epoch=settings.initial_epoch,
            open_ended=settings.open_ended,
        )
        self.evaluation = EvaluationTasks()
        self.prediction = PredictionTasks(self.prediction_layout)
        self.functions = FunctionTasks()
        self._supplies: dict[TaskType, Supply] = {
            TaskType.EVALUATION: self.evaluation,
            TaskType.TRAINING: self.epochs,
            TaskType.PREDICTION: self.prediction,
            TaskType.FUNCTION: self.functions,
            TaskType.TRAIN_END: TrainEndTask(),
        }
        self.todo = Todo(self._supplies)
        self.doing = Leases(settings.lease_seconds)
        self.held = HeldResults()
        self.closed = {kind: dict.fromkeys(TaskState, 0) for kind in TaskType}  # DONE, FAILED, DROPPED
        self.failure: Failure | None = None
        self.finishing = False  # nothing will be added any more
        self.accounting = Accounting()
        self.milestones: list[Milestone] = []  # that were not taken yet
        if training and self.epochs.done:
            self.milestones.append(Milestone(MilestoneKind.TRAINING_DONE))
        if prediction and not self.prediction_layout:
            self.milestones.append(Milestone(MilestoneKind.PREDICTION_DONE))

    def count_done(self, task: Task) -> None:
        self.closed[task.type][TaskState.DONE] += 1
        self.close(task)

    def close(self, task: Task) -> None:
        """Nothing that comes will undo that the task is done."""
        self.milestones += self._supplies[task.type].close(task)

    def counts(self) -> dict[TaskType, dict[TaskState, int]]:
        """How many tasks are in which state; TODO holds those that are still to be made."""
        counts = {kind: {**closed, TaskState.TODO: self.todo.count(kind)} for kind, closed in self.closed.items()}
        for record in self.doing:
            counts[record.task.type][TaskState.DOING] += 1
        return counts

    def copy_accounting(self) -> Accounting:
        return self.accounting.copy(batches_handed_out=self.epochs.batches_made)

    # ------------------------------------------------------------ saving

    def to_dict(self, leases: bool = False) -> dict[str, Any]:
        """See `TaskQueue.to_dict`."""
        records = [record for record in (*self.doing, *self.todo) if record.task.type not in _NOT_SAVED]
        return {
            "format": _FORMAT,
            "settings": asdict(self.settings),
            "training": [list(source) for source in self.training_layout.sources],
            "prediction": [list(source) for source in self.prediction_layout.sources],
            **self.epochs.to_dict(),
            "predicted": self.prediction.made,
            "train_end_added": self.todo.train_end_added,
            "finishing": self.finishing,
            "next_task": self.todo.next_id,
            **self.doing.to_dict(),
            **(self.doing.open_to_dict(_NOT_SAVED) if leases else {}),
            "todo": [record.to_dict() for record in sorted(records, key=lambda record: record.task.id)],
            "closed": {
                kind.value: {state.value: number for state, number in states.items() if number}
                for kind, states in self.closed.items()
                if kind not in _NOT_SAVED
            },
            "accounting": self.copy_accounting().to_dict(),
            "milestones": [
                [milestone.kind.value, milestone.number]
                for milestone in self.milestones
                if milestone.kind is not MilestoneKind.ROUND_DONE
            ],
        }

    def restore(self, saved: dict[str, Any], now: float | None = None) -> None:
        """Takes over what `to_dict` saved of a queue of the same sources and settings; `now` as in `from_dict`."""
        self.accounting = Accounting.from_dict(saved["accounting"])
        self.epochs.restore(saved, self.accounting.batches_handed_out)
        self.prediction.restore(saved["predicted"])
        self.todo.train_end_added = saved["train_end_added"]
        self.todo.next_id = saved["next_task"]
        self.doing.restore(saved)
        self.finishing = saved["finishing"]
        for kind, states in saved["closed"].items():
            for state, number in states.items():
                self.closed[TaskType(kind)][TaskState(state)] = number
        self.milestones = [Milestone(MilestoneKind(kind), number) for kind, number in saved["milestones"]]
        records = [TaskRecord.from_dict(values) for values in saved["todo"]]
        # All are open again before the first is closed, lest half of them look like the whole.
        for record in records:
            self._supplies[record.task.type].reopen(record.task)
        if now is not None:
            self.doing.tell_time(now)
            self.doing.resume_reports(saved["reports"])
            by_id = {record.task.id: record for record in records}
            for lease_id, worker, task_id, *progress in saved["leases"]:
                record = by_id[task_id]
                record.resume(*progress)
                self.doing.resume(record, worker, lease_id)
        for record in records:
            if record.lease is not None:
                continue
            if record.nothing_left:  # its worker had reported all records, but not yet the task
                self.count_done(record.task)
            else:
                self.todo.append(record)
        # A task that had FAILED is not open again; it must not hold its epoch open for ever.
        self.milestones += self.epochs.settle()

    def repeat_milestones(self, ended_epochs: int) -> None:
        """See `TaskQueue.repeat_milestones`."""
        epochs = range(ended_epochs, self.epochs.epochs_done)
        self.milestones = [Milestone(MilestoneKind.EPOCH_DONE, epoch) for epoch in epochs]
        if self.closed[TaskType.TRAIN_END][TaskState.DONE]:
            self.milestones.append(Milestone(MilestoneKind.TRAIN_END_DONE))
        elif self.epochs.done and not self.todo.train_end_added:
            self.milestones.append(Milestone(MilestoneKind.TRAINING_DONE))


@contextmanager
def reading(saved: dict[str, Any]) -> Iterator[None]:
    """Raises `CheckpointError` when `saved` is not what `to_dict` saves."""
    if saved.get("format") != _FORMAT:
        raise CheckpointError(
            f"The task queue in this checkpoint has the format {saved.get('format')!r}; this release "
            f"reads {_FORMAT}. Use the release of elasticcb that wrote it."
        )
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"The task queue in this checkpoint can't be read ({type(error).__name__}: {error}). Its "
            "manifest may have been edited; start from another checkpoint."
        ) from error
