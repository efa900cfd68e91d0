"""The state of one metric, the values of its variables: the state over several tasks from the states of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from elasticcb.errors import ModelFileError, user_traceback
from elasticcb.model.eval_metrics import MeanOfFunction

States = Sequence[Sequence[np.ndarray]]  # of tasks, or batches


def adds_up(metric: keras.metrics.Metric) -> bool:
    """Whether summing its variables over tasks gives the statistics over all records.

    True for Keras's metrics, and for subclasses that do not change how the state is kept.
    """
    for kind in type(metric).__mro__:
        if {"update_state", "reset_state", "merge_state"} & set(vars(kind)):
            return kind.__module__.startswith("keras.") or kind is MeanOfFunction
    return False


def summed(tasks: States) -> list[np.ndarray]:
    """The sum of states."""
    return [np.sum(values, axis=0, dtype=_wide(values[0])) for values in zip(*tasks, strict=True)]


def merged(metric: keras.metrics.Metric, tasks: States) -> list[np.ndarray]:
    """The state that the `merge_state` of a metric makes of states. Raises `ModelFileError` if it can't be copied."""
    # Two copies, so that `merge_state` does not get the model's own metrics.
    total, other = _copy(metric), _copy(metric)
    for number, task in enumerate(tasks):
        assign(other if number else total, task)
        if number:
            total.merge_state([other])
    return [np.asarray(variable.value) for variable in total.variables]


def assign(metric: keras.metrics.Metric, values: Sequence[np.ndarray]) -> None:
    """Sets the state of a metric."""
    for variable, value in zip(metric.variables, values, strict=True):
        variable.assign(value)


def result_of(metric: keras.metrics.Metric, values: Sequence[np.ndarray]) -> Any:
    """The result of a metric with another state than its own."""
    if type(metric).result is keras.metrics.Mean.result:  # of most, many times faster than setting the variables
        total, count = values
        return total / count if count else 0.0
    before = [np.array(variable.value) for variable in metric.variables]
    assign(metric, values)
    try:
        return metric.result()
    finally:
        assign(metric, before)


def _copy(metric: keras.metrics.Metric) -> keras.metrics.Metric:
    try:
        return type(metric).from_config(metric.get_config())
    except Exception as error:
        raise ModelFileError(
            f"The metric {metric.name!r} has merge_state(metrics), so it must be copied to merge the states of tasks, "
            f"but {type(metric).__name__}.from_config(get_config()) raised {type(error).__name__}: {error}. Implement "
            "get_config() with the arguments of its __init__.",
            user_traceback(error),
        ) from error


def _wide(array: np.ndarray) -> Any:
    """A dtype in which the order of summing does not show."""
    return np.float64 if np.asarray(array).dtype.kind in "fV" else None  # V: bfloat16
