"""Models with their own `train_step` or `test_step`, and the logs of these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras


def is_overridden(model: keras.Model, method: str) -> bool:
    """Whether the model overrides a method of Keras, in its class or on the instance."""
    return getattr(getattr(model, method), "__func__", None) is not getattr(keras.Model, method)


@contextlib.contextmanager
def recorded_results(
    metrics: Sequence[keras.metrics.Metric],
) -> Iterator[list[tuple[Any, keras.metrics.Metric, str | None]]]:
    """Context that records (value, metric, key if its result is a dict) of each requested result."""
    recorded: list[tuple[Any, keras.metrics.Metric, str | None]] = []

    def recording(metric: keras.metrics.Metric) -> Callable[[], Any]:
        result_of = metric.result

        def result() -> Any:
            result = result_of()
            parts = result if isinstance(result, Mapping) else {None: result}
            recorded.extend((value, metric, key) for key, value in parts.items())
            return result

        return result

    distinct = {id(metric): metric for metric in metrics}.values()
    before = [vars(metric).get("result") for metric in distinct]  # of a step that calls this one
    for metric in distinct:
        # Around Keras's own __setattr__, which tracks what it is given.
        object.__setattr__(metric, "result", recording(metric))
    try:
        yield recorded
    finally:
        for metric, method in zip(distinct, before, strict=True):
            if method is None:
                object.__delattr__(metric, "result")
            else:
                object.__setattr__(metric, "result", method)


def flat_logs(logs: Any) -> dict[str, Any]:
    """The logs of a step as Keras passes them to callbacks: sorted, with nested dicts flattened."""
    flat: dict[str, Any] = {}
    for key, value in sorted((logs or {}).items()):
        flat.update(flat_logs(value) if isinstance(value, dict) else {key: value})
    return flat
