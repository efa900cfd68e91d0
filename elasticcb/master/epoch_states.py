"""The training metrics of epochs, as workers report their states task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class EpochStates:
    """Adds up the states of metrics, epoch by epoch, until an epoch is ended.

    Attributes:
        merging: metrics whose states don't simply add up: those of each task are kept.
    """

    def __init__(self) -> None:
        self.merging: frozenset[str] = frozenset()
        self._by_epoch: dict[int, dict[str, list[Any]]] = {}

    def add(self, epoch: int, states: Mapping[str, Sequence[Any]]) -> None:
        """A task of `epoch` has brought these, by metric."""
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
        """By metric the sums, or the states of each task."""
        return self._by_epoch.get(epoch, {})

    def forget(self, epoch: int) -> None:
        """It is ended."""
        self._by_epoch.pop(epoch, None)

    def to_journal(self) -> list[tuple[int, dict[str, list[Any]]]]:
        """Epoch and states for `add`, as few as make the same of an empty one."""
        return [
            (epoch, {name: states})
            for epoch, by_name in self._by_epoch.items()
            for name, values in by_name.items()
            for states in (values if name in self.merging else [values])
        ]
