"""When evaluation passes start, and the metric states of tasks: of passes and of epochs. Pure: no threads, clock, gRPC
or Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticcb.errors import UsageError, WireError
from elasticcb.process.wording import how_many

Array = npt.NDArray[Any]
States = dict[str, list[Array]]  # by metric: one array per metric variable
Outputs = Mapping[str, Array]  # labels, predictions and weights of a batch, by path
Merge = Callable[[str, list[list[Array]]], list[Array]]  # (metric, states of each task) -> states


class RoundReason(str, Enum):
    """Why a round is run."""

    STEPS = "evaluation steps"  # every `evaluation_steps` versions
    EPOCH_END = "end of epoch"
    TRAINING_END = "end of training"
    REQUESTED = "requested"  # the job only evaluates


@dataclass(frozen=True, slots=True)
class Round:
    """One evaluation pass. `epoch` is the last epoch before it, if it belongs to an epoch."""

    id: int  # increasing
    version: int  # of the model; all tasks of the round see these weights
    reason: RoundReason
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class RoundDecision:
    """Whether a round starts now, and why (not)."""

    round: Round | None
    reason: str


@dataclass(frozen=True, slots=True)
class Merged:
    """The metrics of a whole round.

    `states` holds the metric variables, in their original shapes and dtypes. `batches` holds the outputs for metrics
    without mergeable state, batch by batch in order of task ids.
    """

    states: States
    batches: list[Outputs]


class EvaluationRounds:
    """Starts rounds one at a time, and collects each task's metric states exactly once.

    Rounds requested while one runs are merged into the next one.

    Args:
        evaluation_steps: model versions between rounds; 0: one round at the end of each epoch.
        start_version: version at which training starts; the first round is due `evaluation_steps` later.
        merge: merges the states that the tasks of a round sent for one metric; they are summed by default. With a
            custom function, the states of all tasks are kept until the round is merged.
        first_id: first round id; workers and servers may know ids of an earlier master.
    """

    def __init__(
        self, *, evaluation_steps: int = 0, start_version: int = 0, merge: Merge | None = None, first_id: int = 1
    ) -> None:
        if evaluation_steps < 0:
            raise UsageError(f"evaluation_steps={evaluation_steps} is invalid: must be 0 or more model versions.")
        self._steps = evaluation_steps
        self._merge = merge
        self._last_version: int | None = None  # of the newest round
        self._steps_from = start_version
        self._next_id = first_id
        self._running: Round | None = None
        self._pending: RoundReason | None = None
        self._pending_epoch: int | None = None
        self._training_ended = False
        self.collection = Collection(merge)

    @property
    def running(self) -> Round | None:
        return self._running

    @property
    def all_done(self) -> bool:
        """Whether training has ended and no round is running or due: TRAIN_END may be handed out."""
        return self._training_ended and self._running is None

    def is_due(self, version: int) -> bool:
        """Whether `version_reached(version)` would start a round."""
        return bool(self._steps) and self._running is None and version >= self._steps_from + self._steps

    def version_reached(self, version: int) -> RoundDecision:
        """The model has reached `version`."""
        if not self._steps:
            return RoundDecision(None, "evaluation runs at the end of each epoch")
        if self._training_ended:
            return RoundDecision(None, "training has ended")
        due = self._steps_from + self._steps
        if version < due:
            return RoundDecision(None, f"version {version}; the next evaluation pass is due at {due}")
        return self._ask(RoundReason.STEPS, version)

    def epoch_ended(self, epoch: int, version: int) -> RoundDecision:
        """All tasks of `epoch` are done, and the model is at `version`."""
        if self._steps:
            return RoundDecision(None, f"evaluation runs every {how_many(self._steps, 'version')}")
        self._pending_epoch = epoch
        return self._ask(RoundReason.EPOCH_END, version)

    def training_ended(self, version: int, evaluates: bool = True) -> RoundDecision:
        """Training has ended at `version`. `evaluates`: one more round evaluates this version."""
        self._training_ended = True
        if not evaluates:
            return RoundDecision(None, "evaluation runs only at the end of epochs")
        if version == self._last_version:
            return RoundDecision(None, f"evaluation pass {self._next_id - 1} was of the last version, {version}")
        return self._ask(RoundReason.TRAINING_END, version)

    def requested(self, version: int) -> RoundDecision:
        """Requests a round, at any version."""
        return self._ask(RoundReason.REQUESTED, version)

    def snapshot_taken(self, version: int) -> None:
        """The running round evaluates `version`, which may be later than the version that made it due."""
        assert self._running is not None
        self._running = replace(self._running, version=version)
        self._last_version = self._steps_from = version

    def collect(
        self,
        round_id: int,
        task_id: int,
        states: Mapping[str, Sequence[Array]],
        batches: Sequence[Outputs] = (),
        restarts: bool = False,
    ) -> bool:
        """Accepts the results of one task of the running round; refuses a second report of the same task. Returns
        whether they were accepted.

        Args:
            states: by metric, the arrays of `metric.variables` over the task's records.
            batches: inputs of metrics without mergeable state, for each batch of the task.
            restarts: these replace the results of earlier tasks.

        Raises `WireError`, and accepts nothing, when metrics, shapes of states or paths of outputs differ from those of
        the round's other tasks.
        """
        is_running = self._running is not None and round_id == self._running.id
        return is_running and self.collection.add(task_id, states, batches, restarts)

    def finish(self, version: int) -> RoundDecision:
        """Ends the running round; returns the next one if it became due meanwhile."""
        self._running = None
        self.collection = Collection(self._merge)
        if self._pending is None:
            return RoundDecision(None, "no other evaluation pass is due")
        return self._ask(self._pending, version)

    def _ask(self, reason: RoundReason, version: int) -> RoundDecision:
        if self._running is not None:
            if self._pending is None or _WEIGHT[reason] > _WEIGHT[self._pending]:
                self._pending = reason
            return RoundDecision(None, f"evaluation pass {self._running.id} is running; another follows it")
        self._running = Round(self._next_id, version, reason, self._pending_epoch)
        self._next_id += 1
        self._last_version = self._steps_from = version
        self._pending = self._pending_epoch = None
        return RoundDecision(self._running, f"{reason.value}, version {version}")


class Collection:
    """The results of the tasks of one round, each counted once."""

    def __init__(self, merge: Merge | None) -> None:
        self._merge = merge
        self._tasks: set[int] = set()
        self._sums: dict[str, _Sums] = {}
        self._states: dict[str, dict[int, list[Array]]] = {}
        self._outputs: dict[int, Sequence[Outputs]] = {}  # by task

    def add(
        self, task_id: int, states: Mapping[str, Sequence[Array]], batches: Sequence[Outputs], restarts: bool = False
    ) -> bool:
        """Whether the results were accepted. Raises the same errors as `EvaluationRounds.collect`."""
        if task_id in self._tasks:
            return False
        self._check(task_id, states, batches)
        self._tasks.add(task_id)
        if restarts:
            self._sums, self._states, self._outputs = {}, {}, {}
        for name, arrays in states.items():
            if self._merge is None:
                self._sums.setdefault(name, _Sums()).add(arrays)
            else:
                self._states.setdefault(name, {})[task_id] = [np.asarray(array) for array in arrays]
        if batches:
            self._outputs[task_id] = batches
        return True

    def merged(self) -> Merged:
        """The metrics over all tasks."""
        if self._merge is None:
            states = {name: sums.result() for name, sums in self._sums.items()}
        else:
            states = {
                name: list(self._merge(name, [by_task[task] for task in sorted(by_task)]))
                for name, by_task in self._states.items()
            }
        batches = [batch for task in sorted(self._outputs) for batch in self._outputs[task]]
        return Merged(states, batches)

    def _check(self, task_id: int, states: Mapping[str, Sequence[Array]], batches: Sequence[Outputs]) -> None:
        known = {*self._sums, *self._states}
        # A task whose records `feed` drops has states (of no records) but no outputs.
        paths = next(({*batch} for batch in batches), set())
        others = next(({*task[0]} for task in self._outputs.values()), paths)
        if self._tasks and (known != {*states} or (paths and paths != others)):
            raise WireError(
                f"Evaluation task {task_id} returned states of {sorted(states)} and outputs at {sorted(paths)}; the "
                f"other tasks of its pass returned {sorted(known)} and {sorted(others)}. The model must have "
                "the same metrics in every process."
            )
        for name, arrays in states.items():
            expected = self._sums[name].shapes if name in self._sums else None
            if name in self._states:
                expected = [array.shape for array in next(iter(self._states[name].values()))]
            # A custom merge function may handle states of different shapes.
            given = [np.shape(array) for array in arrays]
            if expected is not None and (len(given) != len(expected) or (not self._merge and given != expected)):
                raise WireError(
                    f"Evaluation task {task_id} returned states of the shapes {given} for metric {name!r}; the other "
                    f"tasks of its pass returned {expected}. The metric must have the same variables in every process."
                )


# Precedence when a round has several reasons.
_WEIGHT = {reason: weight for weight, reason in enumerate(RoundReason)}


class _Sums:
    """Sums of a metric's variables, in double precision so that the order of tasks does not matter."""

    def __init__(self) -> None:
        self._sums: list[Array] = []
        self._dtypes: list[np.dtype[Any]] = []
        self.shapes: list[tuple[int, ...]] = []

    def add(self, arrays: Sequence[Array]) -> None:
        given = [np.asarray(array) for array in arrays]
        if not self._dtypes:
            self._dtypes = [array.dtype for array in given]
            self.shapes = [array.shape for array in given]
            self._sums = [np.zeros(array.shape, _wide(array.dtype)) for array in given]
        for total, array in zip(self._sums, given, strict=True):
            total += array.astype(total.dtype)

    def result(self) -> list[Array]:
        return [total.astype(dtype) for total, dtype in zip(self._sums, self._dtypes, strict=True)]


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind == "c":
        return np.dtype(np.complex128)
    return np.dtype(np.int64 if dtype.kind in "iub" else np.float64)


class EpochStates:
    """Sums metric states by epoch, until the epoch has ended.

    Attributes:
        merging: metrics whose states can't be summed: those of tasks are kept until they are `merged`.
    """

    _PILE = 8  # states

    def __init__(self) -> None:
        self.merging: frozenset[str] = frozenset()
        self._by_epoch: dict[int, dict[str, list[Any]]] = {}
        self._ended = 0  # epochs before this one have ended

    def add(self, epoch: int, states: Mapping[str, Sequence[Any]]) -> None:
        """Adds the states of a task of `epoch`, by metric; none of an epoch that has ended, of which a part is trained
        again."""
        if epoch < self._ended:
            return
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
        """What follows replaces the states of the epoch."""
        self._by_epoch.pop(epoch, None)

    def end_before(self, epoch: int) -> None:
        """All epochs before this one have ended."""
        self._ended = epoch
        self._by_epoch = {each: states for each, states in self._by_epoch.items() if each >= epoch}

    def to_journal(self) -> list[tuple[int, dict[str, list[Any]]]]:
        """Epochs and states that rebuild this from an empty one through `add`, as few as possible."""
        return [
            (epoch, {name: states})
            for epoch, by_name in self._by_epoch.items()
            for name, values in by_name.items()
            for states in (values if name in self.merging else [values])
        ]
