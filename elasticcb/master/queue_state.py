"""What a task queue knows: what there is to do, what is done, and how that is saved in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from elasticcb.errors import CheckpointError
from elasticcb.master.accounting import Accounting
from elasticcb.master.decisions import Milestone, MilestoneKind
from elasticcb.master.epochs import Epochs
from elasticcb.master.held_results import HeldResults
from elasticcb.master.leases import Leases
from elasticcb.master.queue_settings import QueueSettings
from elasticcb.master.task import BatchesLeft, Lease, Task, TaskState, TaskType
from elasticcb.master.task_record import Failure, TaskRecord
from elasticcb.master.task_sources import EvaluationTasks, FunctionTasks, PredictionTasks, Supply, TrainEndTask
from elasticcb.master.todo import Todo

Queue = TypeVar("Queue", bound="QueueState")

_FORMAT = 1

# Of what these bring about, the master's memory holds the rest: states of metrics, what to call.
_NOT_SAVED = frozenset({TaskType.EVALUATION, TaskType.FUNCTION})


class QueueState:
    """What a queue knows: its tasks by their state (`_todo`, `_doing`, and `_closed`, which only counts them), and the
    rest. A task that was made is in exactly one of the three.

    Args:
        settings: of the queue.
        training: (name, number of records) of each training source.
        prediction: likewise; prediction tasks are handed out in order.

    Attributes:
        failure: the task that ended the job, if one did.
    """

    def __init__(
        self,
        settings: QueueSettings,
        training: Sequence[tuple[str, int]] = (),
        prediction: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._settings = settings
        self._training_layout = settings.layout(training)
        self._prediction_layout = settings.layout(prediction)
        self._epochs = Epochs(self._training_layout, settings)
        self._evaluation = EvaluationTasks()
        self._prediction = PredictionTasks(self._prediction_layout)
        self._functions = FunctionTasks()
        self._supplies: dict[TaskType, Supply] = {
            TaskType.EVALUATION: self._evaluation,
            TaskType.TRAINING: self._epochs,
            TaskType.PREDICTION: self._prediction,
            TaskType.FUNCTION: self._functions,
            TaskType.TRAIN_END: TrainEndTask(),
        }
        self._todo = Todo(self._supplies)
        self._doing = Leases(settings.lease_seconds)
        self._held = HeldResults()
        self._closed = {kind: dict.fromkeys(TaskState, 0) for kind in TaskType}  # DONE, FAILED, DROPPED
        self.failure: Failure | None = None
        self._paused = False  # nothing is handed out, though there may be something
        self._finishing = False  # nothing will be added any more
        self._accounting = Accounting()
        self._milestones: list[Milestone] = []  # that were not taken yet
        if training and self._epochs.done:
            self._milestones.append(Milestone(MilestoneKind.TRAINING_DONE))
        if prediction and not self._prediction_layout:
            self._milestones.append(Milestone(MilestoneKind.PREDICTION_DONE))

    def _count_done(self, task: Task) -> None:
        self._closed[task.type][TaskState.DONE] += 1
        self._settle(task)

    def _settle(self, task: Task) -> None:
        """Nothing that comes will undo that the task is done."""
        self._milestones += self._supplies[task.type].close(task)

    def results_kept(self, worker: int) -> None:
        """`on_predict_end` of the callbacks has run on `worker`: they hold no results in memory any more."""
        for record in self._held.take(worker):
            self._settle(record.task)

    # ------------------------------------------------------------ what there is to do

    def add_evaluation(self, round: int, sources: Sequence[tuple[str, int]]) -> int:
        """Adds the tasks of an evaluation round, ahead of all others; answers how many they are.

        Raises `UsageError` when the round was added before and is not done.
        """
        layout = self._settings.layout(sources)
        self._milestones += self._evaluation.add(round, layout)
        return len(layout)

    def release_epoch(self, epoch: int) -> None:
        """Lets the epoch after `epoch` begin; matters only with `hold_epochs`."""
        self._epochs.release(epoch)

    def pause(self) -> None:
        """Hands out nothing any more; what is DOING may be finished. A queue that is saved now goes on."""
        self._paused = True

    def add_function(self, number: int) -> None:
        """Adds a call, which `number` names, behind all that were added before."""
        self._functions.add(number)

    def add_train_end(self) -> None:
        """Adds the job's one TRAIN_END task, which is handed out when nothing else is left or running."""
        self._todo.add_train_end()

    def finish(self) -> None:
        """Nothing will be added any more: once all is done, `get_task` answers FINISHED, not WAIT."""
        self._finishing = True

    # ------------------------------------------------------------ what it knows

    def take_milestones(self) -> list[Milestone]:
        """What was reached since the last call, in order. Ask after every other call."""
        milestones, self._milestones = self._milestones, []
        return milestones

    @property
    def epoch(self) -> int:
        """The epoch that training tasks are being made of, 0-based."""
        return max(self._epochs.current, 0)

    @property
    def training_done(self) -> bool:
        """Whether all training tasks that there will ever be are done (or dropped)."""
        return self._epochs.done

    @property
    def stop_reason(self) -> str | None:
        """Why training was stopped early, None when it was not."""
        return self._epochs.stop_reason

    @property
    def records_per_epoch(self) -> int:
        return self._training_layout.records

    def ran_out(self, epoch: int) -> bool:
        """Whether the source gave less in `epoch` than was asked of it; where any number will do, whether nothing."""
        expected = 1 if self._settings.open_ended else self.records_per_epoch
        trained = self._accounting.records_trained.get(epoch, 0)
        return epoch in self._epochs.ended_by_source and self.stop_reason is None and trained < expected

    @property
    def accounting(self) -> Accounting:
        """A copy of the numbers up to now."""
        return self._accounting.copy(batches_handed_out=self._epochs.batches_made)

    @property
    def is_idle(self) -> bool:
        """Whether no task is handed out."""
        return not self._doing

    def leases(self, worker: int | None = None) -> list[Lease]:
        """The leases that are out, of one worker or of all, oldest first."""
        records = self._doing if worker is None else self._doing.held_by(worker)
        return [record.lease for record in records if record.lease is not None]

    @property
    def has_returned(self) -> bool:
        """Whether tasks that were handed out before, or parts of them, are to do."""
        return self._todo.has_returned

    def batches_left(self) -> dict[int, list[BatchesLeft]]:
        """By worker, what is left to report of its leases, oldest first."""
        left: dict[int, list[BatchesLeft]] = {}
        for record in self._doing:
            if record.lease is not None:
                task = record.task
                batch = self._settings.minibatch_size
                entry = BatchesLeft(record.lease.id, task.type, task.shard.records, record.reported, batch)
                left.setdefault(record.lease.worker, []).append(entry)
        return left

    def counts(self) -> dict[TaskType, dict[TaskState, int]]:
        """How many tasks are in which state.

        TODO holds the tasks that are still to be made, of all epochs. When `max_batches` will end the
        training early, that part of it is an estimate.
        """
        counts = {kind: {**closed, TaskState.TODO: self._todo.count(kind)} for kind, closed in self._closed.items()}
        for record in self._doing:
            counts[record.task.type][TaskState.DOING] += 1
        return counts

    # ------------------------------------------------------------ saving

    def to_dict(self, leases: bool = False) -> dict[str, Any]:
        """All of it as JSON values, for a checkpoint. DOING tasks are saved as TODO, with what is left.

        Args:
            leases: save, too, what lets workers go on with them.

        Functions and evaluation rounds are left out: the metric states of their finished tasks live in the master's
        memory, so after a restart they begin anew.
        """
        records = [record for record in (*self._doing, *self._todo) if record.task.type not in _NOT_SAVED]
        return {
            "format": _FORMAT,
            "settings": asdict(self._settings),
            "training": [list(source) for source in self._training_layout.sources],
            "prediction": [list(source) for source in self._prediction_layout.sources],
            **self._epochs.to_dict(),
            "predicted": self._prediction.made,
            "train_end_added": self._todo.train_end_added,
            "finishing": self._finishing,
            "next_task": self._todo.next_id,
            **self._doing.to_dict(),
            **(self._doing.open_to_dict(_NOT_SAVED) if leases else {}),
            "todo": [record.to_dict() for record in sorted(records, key=lambda record: record.task.id)],
            "closed": {
                kind.value: {state.value: number for state, number in states.items() if number}
                for kind, states in self._closed.items()
                if kind not in _NOT_SAVED
            },
            "accounting": self.accounting.to_dict(),
            "milestones": [
                [milestone.kind.value, milestone.number]
                for milestone in self._milestones
                if milestone.kind is not MilestoneKind.ROUND_DONE
            ],
        }

    @classmethod
    def from_dict(cls: type[Queue], saved: dict[str, Any], now: float | None = None) -> Queue:
        """The queue that `to_dict` saved; milestones that were not taken come again.

        Args:
            now: seconds; workers go on with their leases, which were saved. None: no lease is out.

        Raises `CheckpointError` when `saved` is something else.
        """
        with _reading(saved):
            sources = ([(name, count) for name, count in saved[kind]] for kind in ("training", "prediction"))
            queue = cls(QueueSettings(**saved["settings"]), *sources)
            queue._restore(saved, now)
        return queue

    def _restore(self, saved: dict[str, Any], now: float | None) -> None:
        self._accounting = Accounting.from_dict(saved["accounting"])
        self._epochs.restore(saved, self._accounting.batches_handed_out)
        self._prediction.restore(saved["predicted"])
        self._todo.train_end_added = saved["train_end_added"]
        self._todo.next_id = saved["next_task"]
        self._doing.restore(saved)
        self._finishing = saved["finishing"]
        for kind, states in saved["closed"].items():
            for state, number in states.items():
                self._closed[TaskType(kind)][TaskState(state)] = number
        self._milestones = [Milestone(MilestoneKind(kind), number) for kind, number in saved["milestones"]]
        records = [TaskRecord.from_dict(values) for values in saved["todo"]]
        # All are open again before the first is closed, lest half of them look like the whole.
        for record in records:
            self._supplies[record.task.type].reopen(record.task)
        if now is not None:
            self._doing.tell_time(now)
            self._doing.resume_reports(saved["reports"])
            by_id = {record.task.id: record for record in records}
            for lease_id, worker, task_id, *progress in saved["leases"]:
                record = by_id[task_id]
                record.resume(*progress)
                self._doing.resume(record, worker, lease_id)
        for record in records:
            if record.lease is not None:
                continue
            if record.nothing_left:  # its worker had reported all records, but not yet the task
                self._count_done(record.task)
            else:
                self._todo.append(record)
        # A task that had FAILED is not open again; it must not hold its epoch open for ever.
        self._milestones += self._epochs.settle()

    def repeat_milestones(self, ended_epochs: int) -> None:
        """For a queue that was saved: what was reached, and perhaps taken, but not carried out, comes again.

        Args:
            ended_epochs: epochs before it need not come again.
        """
        epochs = range(ended_epochs, self._epochs.epochs_done)
        self._milestones = [Milestone(MilestoneKind.EPOCH_DONE, epoch) for epoch in epochs]
        if self._closed[TaskType.TRAIN_END][TaskState.DONE]:
            self._milestones.append(Milestone(MilestoneKind.TRAIN_END_DONE))
        elif self._epochs.done and not self._todo.train_end_added:
            self._milestones.append(Milestone(MilestoneKind.TRAINING_DONE))


@contextmanager
def _reading(saved: dict[str, Any]) -> Iterator[None]:
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
