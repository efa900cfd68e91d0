"""The state of one job, and the effects of its changes. Pure: no threads, clock, gRPC or Keras.

Times are arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.master.accounting import Speed
from elasticcb.master.batch_log import BatchLog
from elasticcb.master.evaluation import EvaluationRounds
from elasticcb.master.gathering import Gathering
from elasticcb.master.members import Role, ServedCluster, Totals, Wish
from elasticcb.master.past import Past
from elasticcb.master.roster import Roster
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.stragglers import Paces
from elasticcb.master.task_queue import TaskQueue
from elasticcb.settings import Command, JobSettings, Updates


class EpochStates:
    """Sums metric states by epoch, until the epoch has ended.

    Attributes:
        merging: metrics whose states can't be summed: those of tasks are kept until they are `merged`.
    """

    _PILE = 8  # states

    def __init__(self) -> None:
        self.merging: frozenset[str] = frozenset()
        self._by_epoch: dict[int, dict[str, list[Any]]] = {}

    def add(self, epoch: int, states: Mapping[str, Sequence[Any]]) -> None:
        """Adds the states of a task of `epoch`, by metric."""
        total = self._by_epoch.setdefault(epoch, {})
        for name, values in states.items():
            if name in self.merging:
                total.setdefault(name, []).append(values)
                continue
            before = total.get(name)
            total[name] = [
                np.asarray(value, np.float64) + (before[i] if before is not None else 0)
                for i, value in enumerate(values)
            ]

    def of(self, epoch: int) -> Mapping[str, list[Any]]:
        """Sums by metric, or the states of each task."""
        return self._by_epoch.get(epoch, {})

    def piles(self) -> list[tuple[int, str, list[Any]]]:
        """Epochs and metrics with states enough to be worth merging."""
        return [
            (epoch, name, list(states))
            for epoch, by_name in self._by_epoch.items()
            for name, states in by_name.items()
            if name in self.merging and len(states) >= self._PILE
        ]

    def merged(self, epoch: int, name: str, tasks: Sequence[Any], state: Sequence[Any]) -> None:
        """`tasks`, the states of the first tasks of `epoch`, are together `state`."""
        kept = self.of(epoch).get(name, [])
        if kept and kept[0] is tasks[0]:  # else they were forgotten meanwhile
            kept[: len(tasks)] = [state]

    def forget(self, epoch: int) -> None:
        """The epoch has ended, or what follows replaces its states."""
        self._by_epoch.pop(epoch, None)

    def to_journal(self) -> list[tuple[int, dict[str, list[Any]]]]:
        """Epochs and states that rebuild this from an empty one through `add`, as few as possible."""
        return [
            (epoch, {name: states})
            for epoch, by_name in self._by_epoch.items()
            for name, values in by_name.items()
            for states in (values if name in self.merging else [values])
        ]


if TYPE_CHECKING:
    from elasticcb.callbacks.warning import CallbackWarning
    from elasticcb.master.callback_arrays import SharedCallbacks
    from elasticcb.master.journal import Memory
    from elasticcb.master.prediction_output import PredictionOutput
    from elasticcb.model.metric_messages import Outputs
    from elasticcb.process.stats import Stats


@dataclass
class Crew:
    """The processes of a cluster, over all its jobs.

    Attributes:
        stats: last statistics of each process, by id.
    """

    roster: Roster
    waiting: set[int] = field(default_factory=set)
    stats: dict[int, Stats] = field(default_factory=dict)
    closing: bool = False


@dataclass
class Effects:
    """Effects of changes of the state.

    Attributes:
        entries: journal entries, in order; "states" are pairs of an epoch and metric states, "restarted" epochs
            without their earlier states.
        driver, everybody: whether to wake the driving thread, or all waiting threads.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    shortens: bool = False
    lines: list[str] = field(default_factory=list)
    driver: bool = False
    everybody: bool = False


def _trains_in_step(settings: JobSettings) -> bool:
    return settings.command is Command.TRAIN and settings.training.updates is Updates.SYNC


class JobRecord:
    """The state of one job, and the effects of its changes on journal, user and waiting threads.

    Args:
        settings: settings of the job; None before the first one.
        datasets: pickled functions that create per-worker datasets, by number.

    Attributes:
        told: fields of the snapshot that the driving thread sets.
        speeds: batches per second of each worker, by id.
        evaluated_before: records evaluated before the last round.
        queue: None until the model is built.
        gathering: None unless each round is of all workers that train.
        cluster: what workers need to know of the servers; None until these hold the model.
        find_index: returns the data reader's index of a file, by mode and name; b"" while unknown.
        lost_ps: when each lost server was lost, by index, until its replacement holds the model.
        wish: the last request to change the number of servers.
        checkpoint_written: when the newest checkpoint was written, or the job started.
        loss: mean over the batches of the last report.
        autoscales: whether the number of workers follows the throughput.
        epoch_states: training metrics.
        calls, results: of FUNCTION tasks by id: functions still to call; results until fetched.
        prediction_output: receives predictions instead of `predictions`: outputs by batch, by first unit of a task.
        error: an error found while answering a call; ends the job.
    """

    def __init__(
        self,
        crew: Crew,
        number: int = 0,
        settings: JobSettings | None = None,
        program: bytes = b"",
        datasets: Mapping[int, bytes] | None = None,
        started: float = 0.0,
    ) -> None:
        self.crew, self.number, self.settings = crew, number, settings
        self.program, self.datasets, self.started = program, {} if datasets is None else datasets, started
        self.checkpoint_written = started
        self.told = JobSnapshot()
        self.speed = Speed()
        self.speeds: dict[int, Speed] = {}
        self.past = Past()
        self.evaluated_before = 0
        self.start_version = 0
        self.queue: TaskQueue | None = None
        self.gathering = Gathering() if settings is not None and _trains_in_step(settings) else None
        self.epoch_version = 0  # of the model when the current epoch began
        self.shared_callbacks: SharedCallbacks | None = None
        self.cluster: ServedCluster | None = None
        self.rounds = EvaluationRounds()
        self.batch_log = BatchLog()
        self.find_index: Callable[[str, str], bytes] = lambda mode, file: b""
        self.lost_ps: dict[int, float] = {}
        self.wish: Wish | None = None
        self.version = 0
        self.loss: float | None = None
        self.totals = Totals()
        self.paces = Paces()
        self.autoscales = False
        self.epoch_states = EpochStates()
        self.calls: dict[int, bytes] = {}
        self.results: dict[int, bytes] = {}
        self.prediction_output: PredictionOutput | None = None
        self.predictions: dict[int, list[Outputs]] = {}
        self.error: Exception | None = None
        self.over = False
        self.has_journal = False
        self._effects = Effects()
        self._warned: set[str] = set()  # warned subjects
        self._noted_totals: dict[str, Any] = {}
        self._noted_roster: dict[str, Any] = {}

    @property
    def roster(self) -> Roster:
        return self.crew.roster

    @property
    def closing(self) -> bool:
        return self.crew.closing

    @property
    def ready(self) -> bool:
        """Whether the servers hold the model and tasks are handed out."""
        return self.cluster is not None and self.queue is not None and not self.closing

    # ------------------------------------------------------------ effects

    def take_effects(self) -> Effects:
        """Removes and returns the effects to apply now."""
        taken, self._effects = self._effects, Effects()
        return taken

    def wake(self) -> None:
        """Wakes all waiting threads."""
        self._effects.everybody = True

    def wake_driver(self) -> None:
        """Wakes only the driving thread: no worker waits for this change."""
        self._effects.driver = True

    def say(self, text: str) -> None:
        """Prints a line about the job to the user."""
        self._effects.lines.append(text)

    def note(self, **entry: Any) -> None:
        """Persists the job's state, with `entry`. Ends the job when that is not possible.

        Failed tasks are not persisted: a resumed job tries them again.
        """
        if self.has_journal and self.queue is not None and self.queue.failure is None:
            totals = self._all_totals()
            if totals != self._noted_totals:
                self._noted_totals = entry["totals"] = totals
            self._write(queue=self.queue.to_dict(leases=True), version=self.version, **entry)

    def note_roster(self) -> None:
        """Persists the roster if it has changed."""
        if self.has_journal and (roster := self.roster.to_dict()) != self._noted_roster:
            self._noted_roster = roster
            self._write(roster=roster, next_id=self.roster.next_id)

    def shorten_journal(self) -> None:
        """Compacts the journal."""
        self._effects.shortens = True

    def _write(self, **entry: Any) -> None:
        if self.has_journal:
            self._effects.entries.append(entry)

    def _all_totals(self) -> dict[str, Any]:
        """Totals of the summary besides the queue's accounting, as JSON values."""
        lost = {role.name: [self.roster.losses.lost[role], self.roster.losses.replaced[role]] for role in Role}
        return {**self.totals.to_dict(), **lost}

    # ------------------------------------------------------------ messages to the user

    def warn(self, warning: CallbackWarning) -> None:
        """Counts the warning; shows the first one of each subject."""
        self.totals.callback_errors += warning.errors
        if warning.subject not in self._warned:
            self._warned.add(warning.subject)
            self.say(warning.text)

    def tell(self, **news: Any) -> None:
        """Sets fields of the snapshot, by name."""
        self.told = replace(self.told, **news)

    def note_progress(self, now: float) -> None:
        """Updates values that must be sampled regularly."""
        if self.settings is None or self.settings.command is not Command.TRAIN:
            return
        if self.told.seconds_to_first_step is None and self.version > self.start_version:
            self.tell(seconds_to_first_step=now - self.started)
            self._write(first_step=now - self.started)
        if self.queue is not None:
            self.speed.note(now, sum(self.queue.accounting.records_trained.values()))

    # ------------------------------------------------------------ after another master

    def resume(self, memory: Memory) -> None:
        """Adopts an earlier master's knowledge of the training."""
        self.version = max(self.version, memory.version)
        totals = dict(memory.totals)
        if totals:
            for role in Role:
                self.roster.losses.count_earlier(role, *totals.pop(role.name))
            self.totals.count_earlier(totals)
        for epoch, tasks in memory.states.items():
            for states in tasks:
                self.epoch_states.add(epoch, states)

    def take_over(self, memory: Memory, queue: TaskQueue, now: float) -> None:
        """Takes over the workers and servers of a killed master, with its queue."""
        assert memory.roster is not None
        self.queue, self.has_journal = queue, True
        self.epoch_states.merging = frozenset(memory.merging_units)
        self.resume(memory)
        self.tell(seconds_to_first_step=memory.first_step)
        self.roster.restore(memory.roster, now)
        self._noted_roster = self.roster.to_dict()
