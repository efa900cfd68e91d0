"""Callbacks whose state comes from the master and, from the only worker, goes back (callbacks/shared_state.py)."""

from __future__ import annotations

from elasticcb.callbacks.dispatch import Dispatcher
from elasticcb.callbacks.hook_conflicts import placed, shares_state
from elasticcb.callbacks.shared_state import SharedState
from elasticcb.clients.master import MasterClient
from elasticcb.settings import JobSettings


class FollowedCallbacks:
    """The worker's side.

    Args:
        client: client of the master.
        callbacks: callbacks of this process.
        settings: settings of the job.
    """

    def __init__(self, client: MasterClient, callbacks: Dispatcher, settings: JobSettings) -> None:
        self._client, self._dispatcher = client, callbacks
        self._returns = shares_state(settings)
        found = [] if settings.model.definition else placed(callbacks.callbacks, settings)
        self._callbacks = [each.callback for each in found]
        self._state: SharedState | None = None
        self._number = 0  # of the state that was adopted
        self._begun: set[int] = set()  # callbacks whose `on_train_begin` has run here

    def fetch(self) -> None:
        """Before the first hook of an epoch or a pass."""
        if not self._callbacks:
            return
        answer = self._client.share_callbacks(self._number)
        if answer.state:
            if self._state is None:
                self._state = SharedState(self._callbacks, self._dispatcher.model)
            sent = self._state.read(answer.state)
            for callback, left in zip(self._callbacks, sent.left, strict=True):
                if not left.keys() <= vars(callback).keys() and id(callback) not in self._begun:
                    self._begun.add(id(callback))
                    self._dispatcher.call_on(callback, "on_train_begin", {})
            self._state.adopt(sent)
            self._number = answer.number

    def give_back(self, learning_rate: float | None) -> None:
        """After the last hook of an epoch or a pass.

        Args:
            learning_rate: set by a hook here; None: it is the servers' base rate.
        """
        if self._returns and self._state is not None:
            state, _ = self._state.dump()
            self._client.share_callbacks(self._number, state, learning_rate)
