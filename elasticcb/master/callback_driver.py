"""Calls the hooks that run on the master, on a model with the servers' weights; those of epochs have entries in the
journal.

Changes that a hook makes are sent back: weights and optimizer state by `load_state`, the learning rate as the new base
rate, `stop_training` to the task queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.callbacks.hook_logs import HookLogs
from elasticcb.callbacks.saved_state import CallbackStates, plain
from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.compute.registry import runs_eagerly
from elasticcb.keras_private import updates_of
from elasticcb.master.batch_log import NumberedBatch
from elasticcb.master.callback_arrays import CallbackArrays
from elasticcb.master.desk import Desk
from elasticcb.master.ps_admin import PSControl
from elasticcb.optimizers.held_state import read_optimizers, write_optimizers
from elasticcb.optimizers.state import LEARNING_RATE, OptimizerState
from elasticcb.optimizers.traits import not_cached, unwrapped
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import Blocks
from elasticcb.sharding.partition import VariableSpec

if TYPE_CHECKING:
    from elasticcb.master.keras_host import ModelHost
    from elasticcb.rpc.tensors import Array

# Batch hooks of a mode: on_…_batch_begin and on_…_batch_end.
_HOOKS = {Mode.TRAINING: "train", Mode.EVALUATION: "test", Mode.PREDICTION: "predict"}


class MasterHooks:
    """The hooks of a job that run on the master.

    Args:
        reached_version: called with the version after a change made here.

    Attributes:
        base_learning_rate: base rate of the servers; None with a schedule, or without an optimizer.
    """

    def __init__(
        self,
        host: ModelHost,
        ps: PSControl,
        stop_training: Callable[[str, bool], None],
        reached_version: Callable[[int], None],
    ) -> None:
        self._host, self._ps = host, ps
        self._stop_training, self._reached_version = stop_training, reached_version
        self._callbacks = host.callbacks
        self._shown: Blocks | None = None  # state that the model was last set to; None: unknown
        self._weights: list[Array] = []  # weights at that time
        self._state: OptimizerState | None = None  # optimizer state set for the current hook
        self._iterations_ahead = 0  # the optimizer's iterations minus the version
        self._round_changed = False  # whether `on_test_begin` changed the weights for the round
        self.base_learning_rate: float | None = None

    def in_order(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Logs of an epoch in Keras's order."""
        return self._host.metrics.in_order(logs)

    def call(self, hook: str, *args: Any, **options: Any) -> None:
        """Calls a hook of training or prediction; `options` as in `Dispatcher.call`."""
        if self._callbacks.wants(hook):
            reads = bool(self._callbacks.readers(hook))
            if reads:
                self._show(self._ps.client.pull(), self._callbacks.needs_optimizer_state(hook))
            self._callbacks.call(hook, *args, **options)
            self._carry_out(hook)
            if reads:
                self._send_changes()

    def call_again(self, hook: str, *args: Any, learning_rate: float | None = None) -> None:
        """Calls a training hook that an earlier process of the job already called, to prepare the callback. Changes
        that it makes to the model are not sent: the servers already hold them, and what was trained since.

        Args:
            learning_rate: the base rate that the hook saw then; None: the current one.
        """
        if self._callbacks.wants(hook):
            if self._callbacks.readers(hook):
                self._show(self._ps.client.pull(), self._callbacks.needs_optimizer_state(hook))
            if learning_rate is not None:
                self._set_learning_rate(learning_rate)
            self._callbacks.call(hook, *args)
            if self._callbacks.stop_requested:
                self._stop_training(self._callbacks.stop_reason, True)
            self._forget()
            if self.base_learning_rate is not None:
                self._set_learning_rate(self.base_learning_rate)

    def begin_round(self, evaluation_round: int) -> int:
        """Calls `on_test_begin` and makes the servers snapshot their weights for the round; returns the version.

        Weights that the hook sets are used only for this round.
        """
        reads, weights = bool(self._callbacks.readers("on_test_begin")), None
        if reads:
            self._show(self._ps.client.pull(), self._callbacks.needs_optimizer_state("on_test_begin"))
        self._callbacks.call("on_test_begin", {})
        self._carry_out()
        if reads:
            weights, _ = self._changed_weights()  # embedding rows are always evaluated as the servers hold them
            self._forget()
        self._round_changed = weights is not None
        return self._ps.snapshot(evaluation_round, weights)

    def end_round(self, evaluation_round: int, logs: dict[str, Any]) -> None:
        """Calls `on_test_end` with the weights of the round; the servers then drop the snapshot."""
        reads = bool(self._callbacks.readers("on_test_end"))
        if reads:
            needs_state = self._callbacks.needs_optimizer_state("on_test_end")
            self._show(self._ps.client.pull_snapshot(evaluation_round), needs_state)
        self._callbacks.call("on_test_end", logs)
        self._carry_out()
        if reads:
            if not self._round_changed:  # else the hook undid what `on_test_begin` did
                self._send_changes()
            self._forget()
        self._ps.release_snapshot(evaluation_round)

    def batches(self, batches: Sequence[NumberedBatch]) -> None:
        """Calls the hooks of batches that workers have finished, in order.

        The model is at least as new as each batch; it is pulled once for all of them.
        """
        if not batches:
            return
        hooks = {f"on_{_HOOKS[batch.event.kind]}_batch_{end}" for batch in batches for end in ("begin", "end")}
        readers = {hook: self._callbacks.readers(hook, len(batches)) for hook in hooks}
        reads = any(readers.values())
        if reads:
            needs_state = any(self._callbacks.needs_optimizer_state(hook) for hook, found in readers.items() if found)
            self._show(self._ps.client.pull(), needs_state)
        for batch in batches:
            event = batch.event
            if event.kind is Mode.TRAINING and self._state is None:
                self._show_steps(event.version)
            metrics = batch.means if self._host.in_program else event.logs
            more: dict[str, Any] = {"size": event.size, "version": event.version}
            begin, end = HookLogs(**more), HookLogs(self._host.metrics.in_order(metrics), **more)
            self._callbacks.call(f"on_{_HOOKS[event.kind]}_batch_begin", batch.index, begin)
            self._callbacks.call(f"on_{_HOOKS[event.kind]}_batch_end", batch.index, end, keras_logs=batch.means)
        self._carry_out()
        if reads:
            self._send_changes()

    def adopt_learning_rate(self, rate: float) -> None:
        """Sets the learning rate of the model on the master to `rate`, the servers' base rate."""
        self._set_learning_rate(rate)
        self.base_learning_rate = self._learning_rate()

    def restore_learning_rate(self, rate: float) -> None:
        """Sets the rate here and on the servers."""
        self._set_learning_rate(rate)
        self._carry_out()

    # ------------------------------------------------------------ the model

    def _show(self, blocks: Blocks, with_state: bool) -> None:
        """Sets the model to `blocks`, and its optimizer to the servers' optimizer state if requested."""
        if self._shown is None or any(new is not old for new, old in zip(blocks, self._shown, strict=True)):
            self._weights, ids = self._ps.client.weights(blocks)
            self._host.assign(self._weights, ids)
            self._shown = list(blocks)
        if not self._host.trains:
            return  # the servers have no optimizer
        if with_state:
            exported = self._ps.export()
            write_optimizers(exported.optimizer, *self._optimizers())
            self._note_iterations(exported.version)
            self._state = read_optimizers(*self._optimizers())
        else:
            self._show_steps(self._ps.client.version)

    def _show_steps(self, version: int) -> None:
        """Makes the optimizer count the steps up to a version: what loggers call the step, and a schedule's rate."""
        if self._host.trains and self._host.optimizer is not None:
            steps = max(0, version + self._iterations_ahead)
            updates_of(unwrapped(self._host.optimizer)).assign(not_cached(steps))

    def _optimizers(self) -> tuple[list[Any], list[Any], list[VariableSpec]]:
        """The model's optimizers, its variables, and their specs."""
        return self._host.all_optimizers(), self._host.model.weights, self._host.variables

    def _note_iterations(self, version: int) -> None:
        if self._host.optimizer is not None:
            self._iterations_ahead = int(updates_of(unwrapped(self._host.optimizer)).numpy()) - version

    def _changed_weights(self) -> tuple[list[Array] | None, dict[int, Array]]:
        """The model's weights if a hook changed them, and the ids of embedding tables."""
        weights, ids = self._host.weights()
        same = all(_same(new, old) for new, old in zip(weights, self._weights, strict=True))
        return None if same else weights, ids

    def _changed_state(self) -> OptimizerState | None:
        if self._state is None:
            return None
        state, before = read_optimizers(*self._optimizers()), self._state
        now = state.slots | state.extras | state.shared
        then = before.slots | before.extras | before.shared
        same = now.keys() == then.keys() and all(
            name == LEARNING_RATE or _same(now[name], then[name])  # it is sent separately, which is cheaper
            for name in now
        )
        return None if same else state

    def _send_changes(self) -> None:
        (weights, ids), state = self._changed_weights(), self._changed_state()
        if weights is not None or state is not None:
            version = self._ps.load_state(weights, state, ids)
            self._note_iterations(version)
            self._reached_version(version)
            self._forget()
        self._state = None

    def _forget(self) -> None:
        self._shown, self._state = None, None

    # ------------------------------------------------------------ other things that a hook may set

    def _carry_out(self, hook: str = "") -> None:
        if self._callbacks.stop_requested:
            self._stop_training(self._callbacks.stop_reason, hook in ("on_train_begin", "on_epoch_begin"))
        rate = self._learning_rate()
        if rate is not None and rate != self.base_learning_rate:
            self._ps.set_learning_rate(rate)
            self.base_learning_rate = rate
        model, optimizer = self._host.model, self._host.optimizer
        if self._host.trains and runs_eagerly(model) and model.optimizer is not optimizer:
            self._callbacks.warn(CallbackWarning("model.optimizer was replaced", _REPLACED))

    def _set_learning_rate(self, rate: float) -> None:
        variable = self._host.learning_rate
        if variable is not None and self._host.trains:
            variable.assign(not_cached(rate))

    def _learning_rate(self) -> float | None:
        variable = self._host.learning_rate
        if variable is None or not self._host.trains:  # without training, servers have no optimizer
            return None
        return float(variable.numpy())


_REPLACED = (
    "A hook has set model.optimizer: the optimizer of the beginning trains on, where Keras would use the new one. "
    "Change its learning rate or its attributes instead, or call fit again with the other optimizer."
)


def _same(new: Array, old: Array) -> bool:
    """Whether two arrays hold the same bytes: NaN equals NaN.

    Args:
        new: what the model holds. JAX holds variables of 64 bits in 32, unless jax_enable_x64 is set.
        old: what the model was set to, in the variable's own dtype.
    """
    if new.shape != old.shape:
        return False
    return bool(np.array_equal(_bytes_of(new), _bytes_of(old.astype(new.dtype, copy=False))))


def _bytes_of(array: Array) -> Array:
    if array.dtype.kind in "OU":
        return array
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class EpochHooks:
    """Calls `on_epoch_begin` and `on_epoch_end`, epoch by epoch."""

    def __init__(
        self,
        desk: Desk,
        hooks: MasterHooks,
        states: CallbackStates,
        arrays: CallbackArrays,
        num_epochs: int,
        has_journal: bool,
        last_logs: dict[str, Any],
    ) -> None:
        self._desk, self._hooks, self._states, self._arrays = desk, hooks, states, arrays
        self._num_epochs, self._has_journal = num_epochs, has_journal
        self.entry: dict[str, Any] = {}
        self.last_logs = last_logs

    def begin(self, epoch: int) -> None:
        """Calls `on_epoch_begin`, unless there is no such epoch."""
        if epoch < self._num_epochs:
            self.entry = {"epoch_begun": True, "learning_rate_before": self._hooks.base_learning_rate}
            self._hooks.call("on_epoch_begin", epoch, {})

    def begin_again(self, epoch: int, learning_rate: float | None) -> None:
        """An earlier master already called it, according to the journal; `learning_rate`: the base rate before that
        call."""
        self.entry = {}
        self._hooks.call_again("on_epoch_begin", epoch, {}, learning_rate=learning_rate)

    def end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Calls `on_epoch_end`, and `on_epoch_begin` of the next epoch unless training is done."""
        logs = self.last_logs = self._hooks.in_order(logs)
        if self._has_journal:
            # If this master dies in a hook, its replacement calls it again, and must not change the rate twice.
            with self._desk.state() as state:
                state.note(learning_rate_at_end=self._hooks.base_learning_rate)
            self._desk.sync_journal()
        given = dict(logs)  # later callbacks, and `History`, see what earlier ones add
        self._hooks.call("on_epoch_end", epoch, given)
        validated = {name: value for name, value in given.items() if name.startswith("val_")}
        logs = self.last_logs = self._hooks.in_order({**logs, **validated})  # by a model's own `evaluate`
        # Before `on_epoch_begin`, which runs again when the job is resumed.
        callbacks = self._callback_states()
        self.entry = {"epoch_begun": False}
        with self._desk.state() as state:
            assert state.queue is not None
            all_trained = state.queue.all_trained
        if not all_trained:
            self.begin(epoch + 1)
        with self._desk.state() as state:
            assert state.queue is not None
            state.epoch_version = state.version
            state.queue.release_epoch(epoch)
            state.epoch_states.forget(epoch)  # only now: the journal keeps them until the epoch has ended
            state.note(
                ended_epochs=epoch + 1,
                learning_rate=self._hooks.base_learning_rate,
                learning_rate_at_end=None,
                logs=plain(logs),
                **self.entry,
                **callbacks,
            )
            state.shorten_journal()
            state.wake()
        self._desk.sync_journal()
        if callbacks:
            self._arrays.drop_others()

    def _callback_states(self) -> dict[str, Any]:
        """States of callbacks, for the journal."""
        if not self._has_journal:
            return {}
        arrays: dict[str, Any] = {}
        return {"callbacks": self._states.save(arrays), "callback_arrays": self._arrays.keep(arrays)}
