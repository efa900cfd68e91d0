"""Runs the hooks of the master, on a model with the servers' weights.

What a hook changes are its `HookEffects`. They are journaled before they are applied, and applying them twice is the
same as once: another master applies what the journal has, and runs the hooks that it does not have. Only weights and
optimizer state, which would be too large for the journal, are sent to the servers before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.callbacks.dispatch import HookLogs
from elasticcb.callbacks.saved_state import CallbackStates, plain
from elasticcb.compute.registry import runs_eagerly
from elasticcb.errors import CallbackWarning
from elasticcb.keras_private import updates_of
from elasticcb.master.batch_log import NumberedBatch
from elasticcb.master.callback_arrays import CallbackArrays
from elasticcb.master.master_server import MasterServer
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


@dataclass(frozen=True)
class HookEffects:
    """What a hook has changed.

    Attributes:
        learning_rate: the base rate that it leaves; None with a schedule, or without an optimizer.
        stop: why training should stop; "": it should not.
        before_batch: as in `TaskQueue.stop_training`.
        weights, ids: all weights, and the ids of embedding tables, if it has changed some; else None.
        optimizer: the same for the state of the optimizers.
    """

    learning_rate: float | None
    stop: str = ""
    before_batch: bool = False
    weights: list[Array] | None = None
    ids: dict[int, Array] = field(default_factory=dict)
    optimizer: OptimizerState | None = None


class MasterHooks:
    """The hooks of a job that run on the master.

    Attributes:
        base_learning_rate: base rate of the servers; None with a schedule, or without an optimizer.
    """

    def __init__(self, host: ModelHost, ps: PSControl, master: MasterServer) -> None:
        self._host, self._ps, self._master = host, ps, master
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

    def run(self, hook: str, *args: Any, **options: Any) -> HookEffects:
        """Calls a hook of training or prediction, and applies nothing; `options` as in `Dispatcher.call`."""
        if not self._callbacks.wants(hook):
            return HookEffects(self.base_learning_rate)
        reads = bool(self._callbacks.readers(hook))
        if reads:
            self._show(self._ps.client.pull(), self._callbacks.needs_optimizer_state(hook))
        self._callbacks.call(hook, *args, **options)
        return self._effects(reads, hook)

    def call(self, hook: str, *args: Any, **options: Any) -> None:
        """Calls a hook, as `run`, and applies its effects."""
        effects = self.run(hook, *args, **options)
        self.send(effects)
        self.apply(effects)

    def prepare(self, hook: str, *args: Any, learning_rate: float | None = None) -> None:
        """Runs a training hook that an earlier process of the job has run, for what it makes of its callback. Of its
        effects, only a request to stop is applied: the servers hold the others, and what was trained since.
        `learning_rate`: the base rate that the hook saw then; None: the current one.
        """
        if learning_rate is not None:
            self._set_learning_rate(learning_rate)
        effects = self.run(hook, *args)
        self._forget()
        if self.base_learning_rate is not None:
            self._set_learning_rate(self.base_learning_rate)
        self.apply(replace(effects, learning_rate=self.base_learning_rate))

    def send(self, effects: HookEffects) -> None:
        """Sends changed weights and optimizer state to the servers."""
        if effects.weights is not None or effects.optimizer is not None:
            version = self._ps.load_state(effects.weights, effects.optimizer, effects.ids)
            self._note_iterations(version)
            self._master.reached_version(version)
            self._forget()

    def apply(self, effects: HookEffects) -> None:
        """Journals and applies the rest; doing so again changes nothing."""
        if effects.stop:
            self._master.stop_training(effects.stop, effects.before_batch)
        rate = effects.learning_rate
        if rate is not None and rate != self.base_learning_rate:
            with self._master.state() as state:
                state.persist(learning_rate=rate)
            self._ps.set_learning_rate(rate)
            self.base_learning_rate = rate

    def begin_round(self, evaluation_round: int) -> int:
        """Calls `on_test_begin` and makes the servers snapshot their weights for the round; returns the version.

        Weights that the hook sets are used only for this round.
        """
        reads, weights = bool(self._callbacks.readers("on_test_begin")), None
        if reads:
            self._show(self._ps.client.pull(), self._callbacks.needs_optimizer_state("on_test_begin"))
        self._callbacks.call("on_test_begin", {})
        effects = self._effects(reads)
        self.apply(effects)
        if reads:
            weights = effects.weights  # embedding rows are always evaluated as the servers hold them
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
        effects = self._effects(reads)
        self.apply(effects)
        if reads:
            if not self._round_changed:  # else the hook undid what `on_test_begin` did
                self.send(effects)
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
            means = event.logs if self._host.of_one_worker else batch.means
            metrics = means if self._host.in_program else event.logs
            more: dict[str, Any] = {"size": event.size, "version": event.version}
            begin, end = HookLogs(**more), HookLogs(self._host.metrics.in_order(metrics), **more)
            self._callbacks.call(f"on_{_HOOKS[event.kind]}_batch_begin", batch.index, begin)
            self._callbacks.call(f"on_{_HOOKS[event.kind]}_batch_end", batch.index, end, keras_logs=means)
        effects = self._effects(reads)
        self.send(effects)
        self.apply(effects)

    def adopt_learning_rate(self, rate: float) -> None:
        """Sets the learning rate of the model on the master to `rate`, the servers' base rate."""
        self._set_learning_rate(rate)
        self.base_learning_rate = self._learning_rate()

    def set_learning_rate(self, rate: float) -> None:
        """Sets the base rate here and on the servers."""
        self._set_learning_rate(rate)
        self.apply(HookEffects(self._learning_rate()))

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

    def _forget(self) -> None:
        self._shown, self._state = None, None

    # ------------------------------------------------------------ other things that a hook may set

    def _effects(self, reads: bool, hook: str = "") -> HookEffects:
        """What hooks have changed since `_show`, if they read the model, and what else they may set."""
        model, optimizer = self._host.model, self._host.optimizer
        if self._host.trains and runs_eagerly(model) and model.optimizer is not optimizer:
            self._callbacks.warn(CallbackWarning("model.optimizer was replaced", _REPLACED))
        weights, ids = self._changed_weights() if reads else (None, {})
        state = self._changed_state() if reads else None
        self._state = None
        stop = self._callbacks.stop_reason if self._callbacks.stop_requested else ""
        before_batch = hook in ("on_train_begin", "on_epoch_begin")
        return HookEffects(self._learning_rate(), stop, before_batch, weights, ids, state)

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
        master: MasterServer,
        hooks: MasterHooks,
        states: CallbackStates,
        arrays: CallbackArrays,
        num_epochs: int,
        last_logs: dict[str, Any],
    ) -> None:
        self._master, self._hooks, self._states, self._arrays = master, hooks, states, arrays
        self._num_epochs = num_epochs
        self.last_logs = last_logs

    def begin(self, epoch: int) -> None:
        """Calls `on_epoch_begin`, unless there is no such epoch; then workers may get its tasks."""
        before = self._hooks.base_learning_rate
        if epoch < self._num_epochs:
            effects = self._hooks.run("on_epoch_begin", epoch, {})
            self._hooks.send(effects)
            with self._master.state() as state:
                state.epoch_begins(learning_rate=effects.learning_rate, learning_rate_before=before)
            self._hooks.apply(effects)
        with self._master.state() as state:
            state.release_epoch(epoch)

    def end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Calls `on_epoch_end`, and `on_epoch_begin` of the next epoch unless training is done."""
        logs = self._hooks.in_order(logs)
        given = dict(logs)  # later callbacks, and `History`, see what earlier ones add
        effects = self._hooks.run("on_epoch_end", epoch, given)
        self._hooks.send(effects)
        validated = {name: value for name, value in given.items() if name.startswith("val_")}
        logs = self.last_logs = self._hooks.in_order({**logs, **validated})  # by a model's own `evaluate`
        callbacks = self._callback_states()
        with self._master.state() as state:
            assert state.queue is not None
            if effects.stop:
                state.stop_training(effects.stop, effects.before_batch)
            state.epoch_ends(epoch, learning_rate=effects.learning_rate, logs=plain(logs), **callbacks)
            all_trained = state.queue.all_trained
        self._master.sync_journal()
        self._hooks.apply(effects)
        if callbacks:
            self._arrays.drop_others()
        if not all_trained:
            self.begin(epoch + 1)

    def _callback_states(self) -> dict[str, Any]:
        """States of callbacks, for the journal."""
        if not self._master.has_journal:
            return {}
        arrays: dict[str, Any] = {}
        return {"callbacks": self._states.save(arrays), "callback_arrays": self._arrays.keep(arrays)}
