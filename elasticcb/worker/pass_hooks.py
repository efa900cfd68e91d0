"""Hooks of epochs and evaluation passes on a worker, for callbacks placed there by `runs_on`; and callbacks and
variables whose state comes from the master, and goes back from the only worker.

A worker sees tasks, not epochs and rounds: one begins with its first task, and ends when a task of another epoch or
round comes, or no more tasks come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elasticcb.callbacks.dispatch import Dispatcher, HookLogs
from elasticcb.callbacks.shared_attributes import Change, SharedAttributes, shares_state, sharing
from elasticcb.callbacks.shared_state import SharedState, SharedVariables
from elasticcb.clients.master import MasterClient
from elasticcb.clients.progress_reporter import ProgressReporter
from elasticcb.model.metric_messages import OUTPUTS, States
from elasticcb.model.metric_states import has_state
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.spec import Spec
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import JobSettings


class PassHooks:
    """Calls `on_epoch_begin/end` and `on_test_begin/end` as this worker sees them."""

    def __init__(self, metrics: ModelMetrics, callbacks: Dispatcher, call: Callable[..., None]) -> None:
        self._metrics = metrics
        self._call = call
        self._has_epochs = callbacks.wants("on_epoch_begin") or callbacks.wants("on_epoch_end")
        self._has_rounds = callbacks.wants("on_test_begin") or callbacks.wants("on_test_end")
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

    def after(self, task: Any, states: States, restarts: bool) -> None:
        """`task` is done, and its records have these metric states.

        Args:
            restarts: they replace those of earlier tasks.
        """
        if restarts:
            self._round_tasks, self._epoch_states = [], {}
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
        self._shown: list[tuple[Any, Any]] = []  # metrics and their states

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
            self._shown = self._metrics.show(self._states)

    def set_by_hooks(self) -> States | None:
        """What hooks have set the metrics to since they were shown; None: nothing."""
        if all(has_state(metric, state) for metric, state in self._shown):
            return None
        return self._metrics.states()

    def show_pass(self) -> States:
        """Like `show`, for hooks of an evaluation. Returns the states of the current task, for `show_task`."""
        if not self._wanted:
            return {}
        of_task = self._metrics.states()
        self._shown = self._metrics.show(self._with(of_task))
        return of_task

    def show_task(self, states: States) -> None:
        """Sets the model's metrics back to the states of the current task, with which it continues."""
        if states:
            self._metrics.show(states)

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


_SEED = "seed_generator_state"  # in the names of Keras's variables


class FollowedCallbacks:
    """The worker's side.

    Args:
        spec: the program.
        progress: gets warnings for the user.
    """

    def __init__(
        self,
        client: MasterClient,
        callbacks: Dispatcher,
        settings: JobSettings,
        spec: Spec,
        progress: ProgressReporter,
    ) -> None:
        self._client, self._dispatcher, self._progress = client, callbacks, progress
        self._spec, self._variables, self._followed = spec, SharedVariables(spec.variables), spec.followed
        self._returns = shares_state(settings)
        self._attributes = SharedAttributes(self._followed, takes_turns=self._returns)
        found = sharing(callbacks.callbacks, settings)
        self._callbacks = [each.callback for each in found]
        self._state = SharedState(found, self._returns, callbacks.model, self._variables)
        self._has_state = False  # whether the master has sent that of callbacks
        self._number = 0  # of the state that was adopted
        self._has_warned = False
        self._begun: set[int] = set()  # callbacks whose `on_train_begin` has run here

    def fetch(self) -> None:
        """Before the first hook of an epoch or a pass."""
        if not self._callbacks and not self._variables and not self._followed:
            return
        answer = self._client.share_callbacks(self._number)
        if answer.state:
            self._has_state = True
            sent = self._state.read(answer.state)
            for callback, left in zip(self._callbacks, sent.left, strict=True):
                if not left.keys() <= vars(callback).keys() and id(callback) not in self._begun:
                    self._begun.add(id(callback))
                    self._dispatcher.call_on(callback, "on_train_begin", {})
            if not self._returns:  # each worker has random numbers of its own
                sent.variables = {n: value for n, value in sent.variables.items() if not self._is_seed(n)}
            self._state.adopt(sent)
            self._variables.follow(sent.variables)
            self._follow(sent.attributes)
            self._number = answer.number

    def _follow(self, changes: Mapping[Any, Change]) -> None:
        found, conflicts = self._attributes.adopt(changes)
        if found:
            self._spec.follow()
        if conflicts:
            names = ", ".join(sorted(map(str, conflicts)))
            self._progress.warn(
                f"{names} changed on both sides",
                f"{names} changes in hooks in your process, but workers can't follow: their steps or data change it, "
                "too, or it can't be set. Use different attributes, or a keras.Variable.",
            )

    @property
    def follows(self) -> bool:
        """Whether steps and data may read what hooks elsewhere set."""
        return bool(self._followed)

    @property
    def is_awaited(self) -> bool:
        """Whether hooks on the master wait for `give_back`."""
        return self._returns and (self._has_state or bool(self._variables) or self.follows)

    def give_back(self, learning_rate: float | None) -> None:
        """After the last hook of an epoch or a pass.

        Args:
            learning_rate: set by a hook here; None: it is the servers' base rate.
        """
        if not self._returns:
            self._warn_of_changes()
        elif self.is_awaited:
            state, _ = self._state.dump(self._attributes.changed())
            self._client.share_callbacks(self._number, state, learning_rate)

    def _is_seed(self, number: int) -> bool:
        return _SEED in self._variables.names_of([number])[0]

    def _warn_of_changes(self) -> None:
        """Of variables that each worker changes for itself, except the state of random generators."""
        names = self._variables.names_of(n for n in self._variables.differing() if not self._is_seed(n))
        if names and not self._has_warned:
            self._has_warned = True
            self._progress.warn(
                f"{', '.join(names)} changed on workers",
                f"Steps on workers change {', '.join(names)}, not counted among the model's weights. Each worker has "
                "its own, and your process keeps the value that it has. Use add_weight(trainable=False) of a layer to "
                "share such changes, or one worker.",
            )
