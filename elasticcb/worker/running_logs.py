"""`logs` of batches as Keras passes them: metrics over all batches of the epoch or evaluation pass so far."""

from __future__ import annotations

from typing import Any

from elasticcb.model.metric_messages import States
from elasticcb.model.metrics import ModelMetrics


class RunningLogs:
    """The metrics over what this worker has computed of an epoch or a pass.

    Args:
        wanted: whether a hook takes them.
    """

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
            self._states = self._with(states)

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
