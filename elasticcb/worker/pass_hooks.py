"""Hooks of epochs and evaluation passes on a worker, for callbacks placed there by `runs_on`.

A worker sees tasks, not epochs and rounds: one begins with its first task, and ends when a task of
another epoch or round comes, or no more tasks come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from elasticcb.callbacks.hook_logs import HookLogs
from elasticcb.model.metric_messages import OUTPUTS, States
from elasticcb.model.metrics import ModelMetrics
from elasticcb.proto import elasticcb_pb2 as pb


class PassHooks:
    """Calls `on_epoch_begin/end` and `on_test_begin/end` as this worker sees them."""

    def __init__(self, metrics: ModelMetrics, wants: Callable[[str], bool], call: Callable[..., None]) -> None:
        self._metrics = metrics
        self._call = call
        self._has_epochs = wants("on_epoch_begin") or wants("on_epoch_end")
        self._has_rounds = wants("on_test_begin") or wants("on_test_end")
        self._epoch: int | None = None  # current epoch
        self._epoch_states: States = {}
        self._round: int | None = None  # current round
        self._round_version = 0
        self._round_tasks: list[States] = []

    def leave(self, task: Any) -> None:
        """Ends what the next `task` does not belong to."""
        if task.type != pb.EVALUATION or task.evaluation_round != self._round:
            self._end_round()
        if task.type == pb.TRAIN_END or self._is_of_next_epoch(task):
            self._end_epoch()

    def enter(self, task: Any, snapshot_version: int) -> None:
        """Begins what `task` is the first of; the weights of an evaluation pass have version `snapshot_version`."""
        if task.type == pb.EVALUATION and self._has_rounds and self._round is None:
            self._round, self._round_version = task.evaluation_round, snapshot_version
            self._call("on_test_begin", {})
        elif self._is_of_next_epoch(task) and self._has_epochs:
            self._epoch = task.epoch
            self._call("on_epoch_begin", task.epoch, {})

    def _is_of_next_epoch(self, task: Any) -> bool:
        # A requeued task of an older epoch counts into the current one.
        return task.type == pb.TRAINING and (self._epoch is None or task.epoch > self._epoch)

    def after(self, task: Any, states: States) -> None:
        """`task` is done, and its records have these metric states."""
        if task.type == pb.EVALUATION and self._round is not None:
            self._round_tasks.append(states)
        elif task.type == pb.TRAINING and self._epoch is not None:
            for name, values in states.items():
                before = [self._epoch_states[name]] if name in self._epoch_states else []
                self._epoch_states[name] = self._metrics.merge_states(name, [*before, values])

    def end(self) -> None:
        """No more tasks come."""
        self._end_round()
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._epoch is not None:
            epoch, states = self._epoch, self._epoch_states
            self._epoch, self._epoch_states = None, {}
            self._metrics.load(states)
            self._call("on_epoch_end", epoch, self._metrics.results(step="train"))

    def _end_round(self) -> None:
        if self._round is not None:
            tasks = self._round_tasks
            self._round, self._round_tasks = None, []
            names = tasks[0] if tasks else ()
            states = {name: self._metrics.merge_states(name, [task[name] for task in tasks]) for name in names}
            self._metrics.load(states)
            results, nested = self._metrics.results(states), self._metrics.nested_results(states)
            logs = HookLogs(sorted(results.items()), metrics=nested, version=self._round_version)
            self._call("on_test_end", logs)


class RunningLogs:
    """The metrics over what this worker has computed of an epoch or a pass."""

    def __init__(self, metrics: ModelMetrics, wanted: bool) -> None:
        self._metrics, self._wanted = metrics, wanted
        self._merging = metrics.merging_units
        self._states: States = {}

    def begin(self) -> None:
        """Another epoch or pass begins."""
        self._states = {}

    def add(self, states: States) -> None:
        """The states of the metrics over some more batches."""
        if self._wanted:
            goes_on = {*self._metrics.replayed, OUTPUTS}  # the metrics themselves have them over all of it
            self._states = self._with({name: own for name, own in states.items() if name not in goes_on})

    def show(self) -> None:
        """Sets the model's metrics to these states, for hooks. A training step sets them back."""
        if self._wanted:
            self._metrics.show(self._states)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """The same for hooks of an evaluation, whose current task continues from its own states."""
        if not (self._wanted and self._states):
            yield
            return
        of_task = self._metrics.states()
        self._metrics.show(self._with(of_task))
        try:
            yield
        finally:
            self._metrics.show(of_task)

    def logs(self, logs: dict[str, Any], step: str) -> dict[str, Any]:
        """`logs` of a batch, with the metrics over everything that was added."""
        return {**logs, **self._metrics.results_of(self._states, step)}

    def evaluated(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Like `logs`, while the model's metrics have the states of the current task, which are not added yet."""
        if not self._states:
            return logs
        return {**logs, **self._metrics.results_of(self._with(self._metrics.states()), "test")}

    def _with(self, states: States) -> States:
        return {
            name: self._merged(name, self._states[name], values) if name in self._states else values
            for name, values in states.items()
        }

    def _merged(self, name: str, before: Any, values: Any) -> list[Any]:
        if name in self._merging:
            return self._metrics.merge_states(name, [before, values])
        return [old + new for old, new in zip(before, values, strict=True)]
