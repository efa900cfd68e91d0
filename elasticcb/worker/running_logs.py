"""`logs` of batches as Keras passes them: metrics over all batches of the epoch or evaluation pass so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticcb.model.metric_messages import States
from elasticcb.model.metrics import ModelMetrics


class RunningLogs:
    """The metrics over what this worker has computed of an epoch or a pass.

    Args:
        metrics: metrics of the model.
        wanted: whether a hook takes them.
    """

    def __init__(self, metrics: ModelMetrics, wanted: bool) -> None:
        self._metrics, self._wanted = metrics, wanted
        self._states: States = {}

    def begin(self) -> None:
        """Another epoch or pass begins."""
        self._states = {}

    def add(self, states: States) -> None:
        """The states of the metrics over some more batches."""
        if self._wanted:
            self._states = self._with(states)

    def logs(self, logs: Mapping[str, Any], step: str) -> dict[str, Any]:
        """`logs` of a batch, with the metrics over everything that was added.

        Args:
            step: "train" or "test".
        """
        return {**logs, **self._metrics.results_of(self._states, step)}

    def evaluated(self, logs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Like `logs`, while the model's metrics have the states of the current task, which are not added yet."""
        if not self._states:
            return logs
        return {**logs, **self._metrics.results_of(self._with(self._metrics.states()), "test")}

    def _with(self, states: States) -> States:
        merge, before = self._metrics.merge_states, self._states
        return {name: merge(name, [before[name], new]) if name in before else new for name, new in states.items()}
