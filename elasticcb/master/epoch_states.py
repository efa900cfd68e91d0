"""Training metrics of epochs, from the states that workers report for each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class EpochStates:
    """Sums metric states by epoch, until the epoch has ended.

    Attributes:
        merging: metrics whose states can't be summed: the states of each task are kept.
    """

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

    def forget(self, epoch: int) -> None:
        """The epoch has ended."""
        self._by_epoch.pop(epoch, None)

    def to_journal(self) -> list[tuple[int, dict[str, list[Any]]]]:
        """Epochs and states that rebuild this from an empty one through `add`, as few as possible."""
        return [
            (epoch, {name: states})
            for epoch, by_name in self._by_epoch.items()
            for name, values in by_name.items()
            for states in (values if name in self.merging else [values])
        ]
