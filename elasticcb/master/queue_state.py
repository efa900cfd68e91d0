"""The state of a task queue: open and closed tasks, and how they are saved in a checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from elasticcb.errors import CheckpointError
from elasticcb.master.accounting import Accounting, Failure, TaskRecord
from elasticcb.master.epochs import Epochs
from elasticcb.master.leases import Leases
from elasticcb.master.shards import Shard
from elasticcb.master.task import (
    HANDING_OUT_ORDER,
    BatchesLeft,
    Lease,
    Milestone,
    MilestoneKind,
    QueueSettings,
    Task,
    TaskEvent,
    TaskState,
    TaskType,
    training_part,
)
from elasticcb.master.task_sources import EvaluationTasks, FunctionTasks, PredictionTasks, Supply, TrainEndTask


class HeldResults:
    """Tasks that each worker has predicted, until the `on_predict_end` hooks of its callbacks have run.

    Then the results are safe. If the worker is lost before, its results are lost too.
    """

    def __init__(self) -> None:
        self._by_worker: dict[int, list[TaskRecord]] = {}

    def hold(self, worker: int, record: TaskRecord) -> None:
        """`worker` has reported the task as done."""
        self._by_worker.setdefault(worker, []).append(record)

    def take(self, worker: int) -> list[TaskRecord]:
        """Removes and returns the tasks of `worker`, in the order of its reports."""
        return self._by_worker.pop(worker, [])

    def __len__(self) -> int:
        return sum(map(len, self._by_worker.values()))


class Todo:
    """The tasks that are TODO. Hands them out by type, in `HANDING_OUT_ORDER`; within a type, requeued ones first.

    Tasks are created when they are handed out, so pending ones cost no memory here.
    """

    def __init__(self, supplies: Mapping[TaskType, Supply]) -> None:
        self.next_id = 1
        self.train_end_added = False
        self._again: dict[TaskType, deque[TaskRecord]] = {kind: deque() for kind in HANDING_OUT_ORDER}
        self._supplies = supplies
        self._in_order = [(kind, self._again[kind], supplies[kind]) for kind in HANDING_OUT_ORDER]

    def take(self, train_end: bool, idle: bool = True) -> TaskRecord | None:
        """The next task; None when there is none (now)."""
        for kind, again, supply in self._in_order:
            if kind is TaskType.TRAIN_END and not train_end:
                continue
            for record in again:
                if idle or not record.for_idle:
                    again.remove(record)
                    return record
            task = supply.make(self.next_id)
            if task is not None:
                self.next_id += 1
                return TaskRecord(task)
        return None

    def put_back(self, record: TaskRecord) -> None:
        """Requeues a task ahead of all others of its type."""
        self._again[record.task.type].appendleft(record)

    def append(self, record: TaskRecord) -> None:
        """Appends a task after all requeued ones, before those still to be created."""
        self._again[record.task.type].append(record)

    def split(self, record: TaskRecord, end: int) -> None:
        """Splits `record` after its first `end` records, and appends the rest."""
        rest = TaskRecord(record.cut(end, self.next_id))
        self.next_id += 1
        rest.for_idle = True
        self._supplies[rest.task.type].reopen(rest.task)
        self.put_back(rest)

    def add_train_end(self) -> None:
        """Adds the only TRAIN_END task; repeating it has no effect."""
        if self.train_end_added:
            return
        self.train_end_added = True
        self.append(TaskRecord(Task(self.next_id, TaskType.TRAIN_END, Shard("", 0, 0))))
        self.next_id += 1

    def remove_all(self, kind: TaskType) -> list[TaskRecord]:
        """Removes the requeued tasks of a type; its supply is not touched."""
        records = list(self._again[kind])
        self._again[kind].clear()
        return records

    @property
    def has_returned(self) -> bool:
        """Whether there are requeued tasks."""
        return any(self._again.values())

    @property
    def train_end_waits(self) -> bool:
        return bool(self._again[TaskType.TRAIN_END])

    def count(self, kind: TaskType) -> int:
        """Number of requeued tasks, and of those still to be created."""
        return len(self._again[kind]) + self._supplies[kind].to_make

    def __iter__(self) -> Iterator[TaskRecord]:
        """The requeued tasks."""
        for again in self._again.values():
            yield from again


Queue = TypeVar("Queue", bound="QueueState")

_FORMAT = 2  # 1: without what is trained again

# Results of these are kept elsewhere in the master's memory: metric states, functions to call.
_NOT_SAVED = frozenset({TaskType.EVALUATION, TaskType.FUNCTION})


class QueueState:
    """The tasks of a queue by their state (`_todo`, `_doing`, and `_closed`, which only counts them), and everything
    else it knows. Every created task is in exactly one of the three.

    Args:
        prediction: the same for prediction; its tasks are handed out in order.
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
        self._pauses: dict[str, str] = {}  # why nothing is handed out, even if there are tasks; by who paused it
        self._finishing = False  # no more tasks will be added
        self._stops_after: tuple[str, int] | None = None  # why the first batch after an epoch will be the last one
        self._accounting = Accounting()
        self._milestones: list[Milestone] = []  # not fetched yet
        self._given = {
            "format": _FORMAT,
            "settings": asdict(settings),
            "training": [list(source) for source in self._training_layout.sources],
            "prediction": [list(source) for source in self._prediction_layout.sources],
        }
        if training and self._epochs.done:
            self._milestones.append(Milestone(MilestoneKind.TRAINING_DONE))
        if prediction and not self._prediction_layout:
            self._milestones.append(Milestone(MilestoneKind.PREDICTION_DONE))

    def _count_done(self, task: Task) -> None:
        self._closed[task.type][TaskState.DONE] += 1
        self._settle(task)

    def _settle(self, task: Task) -> None:
        """The task is done for good."""
        self._milestones += self._supplies[task.type].close(task)

    def _repeat(self, part: Task) -> None:
        """Part of a training task, or of several attempts at it, is trained again as a task of its own."""
        record = TaskRecord(replace(part, id=self._todo.next_id))
        self._todo.next_id += 1
        self._accounting.count_records(part, -part.shard.records)
        self._epochs.reopen(record.task)
        ends = [
            each for each in self._milestones if each.kind is MilestoneKind.EPOCH_DONE and each.number >= part.epoch
        ]
        if ends:  # nobody has acted on them: these epochs end later
            self._milestones = [each for each in self._milestones if each not in ends]
            self._epochs.epochs_done = ends[0].number
        if self._epochs.stop_reason is None:
            record.maybe_done = True
            self._todo.append(record)
            return
        record.move(TaskEvent.TRAINING_STOPPED)
        self._closed[TaskType.TRAINING][TaskState.DROPPED] += 1
        self._accounting.count_dropped(part.epoch, part.shard.records)
        self._milestones += self._epochs.close(record.task)

    def results_kept(self, worker: int) -> None:
        """`on_predict_end` of the callbacks has run on `worker`: their results are safe."""
        for record in self._held.take(worker):
            self._settle(record.task)

    # ------------------------------------------------------------ what there is to do

    def add_evaluation(self, round: int, sources: Sequence[tuple[str, int]]) -> int:
        """Adds the tasks of an evaluation pass, ahead of all others; returns their number.

        Raises `UsageError` when the round was added before and is not done.
        """
        layout = self._settings.layout(sources)
        self._milestones += self._evaluation.add(round, layout)
        return len(layout)

    def release_epoch(self, epoch: int) -> None:
        """Lets the epoch after `epoch` begin; matters only with `hold_epochs`."""
        self._epochs.release(epoch)

    def pause(self, who: str, why: str) -> bool:
        """Stops handing out tasks; DOING tasks may finish. With an empty `why`, `who` pauses it no longer. A queue
        saved now continues when restored. Returns whether this changes anything."""
        before = self._pauses.get(who, "")
        self._pauses[who] = why
        return before != why

    def add_function(self, number: int) -> None:
        """Adds a function call with id `number`, after all earlier ones."""
        self._functions.add(number)

    def add_train_end(self) -> None:
        """Adds the job's only TRAIN_END task, handed out when no other task is open."""
        self._todo.add_train_end()

    def finish(self) -> None:
        """No more tasks will be added: once all are done, `get_task` returns FINISHED instead of WAIT."""
        self._finishing = True

    # ------------------------------------------------------------ queries

    @property
    def has_milestones(self) -> bool:
        """Whether `take_milestones` would return any."""
        return bool(self._milestones)

    def take_milestones(self) -> list[Milestone]:
        """Milestones reached since the last call, in order. Call it after every other call."""
        milestones, self._milestones = self._milestones, []
        return milestones

    @property
    def epoch(self) -> int:
        """The epoch whose training tasks are being created, 0-based."""
        return max(self._epochs.current, 0)

    @property
    def batches_handed_out(self) -> int:
        """Of training; a range that is handed out again counts once."""
        return self._epochs.batches_made

    @property
    def training_done(self) -> bool:
        """Whether all training tasks are done (or dropped), and the servers have saved that."""
        return self._epochs.done

    @property
    def all_trained(self) -> bool:
        """Whether all training tasks are done (or dropped); training is, once that is saved."""
        return self._epochs.all_trained

    @property
    def stop_reason(self) -> str | None:
        """Why training was stopped early; None if it was not."""
        return self._epochs.stop_reason if self._stops_after is None else self._stops_after[0]

    @property
    def records_per_epoch(self) -> int:
        return self._training_layout.records

    def ran_out(self, epoch: int) -> bool:
        """Whether the source ended too early in `epoch`; if any number is fine, whether it was empty."""
        expected = 1 if self._settings.open_ended else self.records_per_epoch
        trained = self._accounting.records_trained.get(epoch, 0)
        return epoch in self._epochs.ended_by_source and self.stop_reason is None and trained < expected

    @property
    def accounting(self) -> Accounting:
        """A copy of the current counters."""
        return self._accounting.copy(batches_handed_out=self._epochs.batches_made)

    @property
    def is_idle(self) -> bool:
        """Whether no task is handed out."""
        return not self._doing

    def leases(self, worker: int | None = None) -> list[Lease]:
        """Active leases, of one worker or of all, oldest first."""
        records = self._doing if worker is None else self._doing.held_by(worker)
        return [record.lease for record in records if record.lease is not None]

    @property
    def workers_in_training(self) -> list[int]:
        """Ids of the workers that hold training tasks."""
        return sorted({lease.worker for lease in self.leases() if lease.task.type is TaskType.TRAINING})

    @property
    def has_returned(self) -> bool:
        """Whether requeued tasks, or parts of tasks, are waiting."""
        return self._todo.has_returned

    def batches_left(self) -> dict[int, list[BatchesLeft]]:
        """Batches left to report of each worker's leases, oldest first."""
        left: dict[int, list[BatchesLeft]] = {}
        for record in self._doing:
            if record.lease is not None:
                task = record.task
                batch = self._settings.minibatch_size
                entry = BatchesLeft(record.lease.id, task.type, task.shard.records, record.reported, batch)
                left.setdefault(record.lease.worker, []).append(entry)
        return left

    def counts(self) -> dict[TaskType, dict[TaskState, int]]:
        """The number of tasks in each state.

        TODO includes tasks still to be created, of all epochs. If `max_batches` will end training early, that part is
        an estimate.
        """
        counts = {kind: {**closed, TaskState.TODO: self._todo.count(kind)} for kind, closed in self._closed.items()}
        for record in self._doing:
            counts[record.task.type][TaskState.DOING] += 1
        return counts

    # ------------------------------------------------------------ saving

    def to_dict(self, leases: bool = False) -> dict[str, Any]:
        """The whole state as JSON values, for a checkpoint; what never changes, such as sources, as the same objects.
        DOING tasks are saved as TODO, with their remaining records.

        Args:
            leases: also save what workers need to continue their leases.

        Functions and evaluation passes are not saved: the metric states of their finished tasks are in the master's
        memory, so they start over after a restart.
        """
        records = [record for record in (*self._doing, *self._todo) if record.task.type not in _NOT_SAVED]
        return {
            **self._given,
            **self._epochs.to_dict(),
            "predicted": self._prediction.made,
            "train_end_added": self._todo.train_end_added,
            "finishing": self._finishing,
            "stops_after": self._stops_after,
            "next_task": self._todo.next_id,
            **self._doing.to_dict(),
            "stale": [part.to_list() for record in self._doing if (part := record.stale_part(record.reported))],
            **(self._doing.open_to_dict(_NOT_SAVED) | {"unsaved": self._epochs.unsaved.to_list()} if leases else {}),
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
        """The queue saved by `to_dict`; milestones that were not fetched are repeated.

        Raises `CheckpointError` when `saved` is invalid.
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
        self._stops_after = saved["stops_after"] and tuple(saved["stops_after"])
        for kind, states in saved["closed"].items():
            for state, number in states.items():
                self._closed[TaskType(kind)][TaskState(state)] = number
        self._milestones = [Milestone(MilestoneKind(kind), number) for kind, number in saved["milestones"]]
        records = [TaskRecord.from_dict(values) for values in saved["todo"]]
        # Reopen all before closing the first, or a half-restored epoch would look complete.
        for record in records:
            self._supplies[record.task.type].reopen(record.task)
        for part in saved.get("unsaved", ()):
            self._epochs.unsaved.add(training_part(*part))
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
        for part in saved["stale"] if now is None else ():  # else they come back when their leases end
            self._repeat(training_part(*part))
        # A FAILED task is not open again, and must not keep its epoch open forever.
        self._milestones += self._epochs.settle()

    def repeat_milestones(self, ended_epochs: int) -> None:
        """After restoring: repeats milestones that were reached, and perhaps fetched, but not acted on.

        Args:
            ended_epochs: the end of epochs before this one needs no repetition.
        """
        epochs = range(ended_epochs, self._epochs.epochs_done)
        self._milestones = [Milestone(MilestoneKind.EPOCH_DONE, epoch) for epoch in epochs]
        if self._closed[TaskType.TRAIN_END][TaskState.DONE]:
            self._milestones.append(Milestone(MilestoneKind.TRAIN_END_DONE))
        elif self._epochs.done and not self._todo.train_end_added:
            self._milestones.append(Milestone(MilestoneKind.TRAINING_DONE))


@contextmanager
def _reading(saved: dict[str, Any]) -> Iterator[None]:
    """Raises `CheckpointError` when `saved` was not written by `to_dict`."""
    if saved.get("format") != _FORMAT:
        raise CheckpointError(
            f"The task queue in this checkpoint has format {saved.get('format')!r}; this release reads format "
            f"{_FORMAT}. Use the release of elasticcb that wrote the checkpoint."
        )
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"The task queue in this checkpoint can't be read ({type(error).__name__}: {error}). Its "
            "manifest may have been edited. Start from another checkpoint."
        ) from error
