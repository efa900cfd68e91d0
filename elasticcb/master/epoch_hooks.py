"""The epoch hooks on the master, and their journal entries."""

from __future__ import annotations

from typing import Any

from elasticcb.callbacks.saved_state import CallbackStates, plain
from elasticcb.master.callback_arrays import CallbackArrays
from elasticcb.master.callback_driver import MasterHooks
from elasticcb.master.desk import Desk


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
