"""Callbacks and variables whose state comes from the master, and goes back from the only worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elasticcb.callbacks.dispatch import Dispatcher
from elasticcb.callbacks.hook_conflicts import shares_state, sharing
from elasticcb.callbacks.shared_attributes import Change, SharedAttributes
from elasticcb.callbacks.shared_state import SharedState, SharedVariables
from elasticcb.clients.master import MasterClient
from elasticcb.model.spec import Spec
from elasticcb.settings import JobSettings

_SEED = "seed_generator_state"  # in the names of Keras's variables


class FollowedCallbacks:
    """The worker's side.

    Args:
        spec: the program.
        warn: called with a subject and a text.
    """

    def __init__(
        self,
        client: MasterClient,
        callbacks: Dispatcher,
        settings: JobSettings,
        spec: Spec,
        warn: Callable[[str, str], None],
    ) -> None:
        self._client, self._dispatcher, self._warn = client, callbacks, warn
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
            self._warn(
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
            self._warn(
                f"{', '.join(names)} changed on workers",
                f"Steps on workers change {', '.join(names)}, not counted among the model's weights. Each worker has "
                "its own, and your process keeps the value that it has. Use add_weight(trainable=False) of a layer to "
                "share such changes, or one worker.",
            )
