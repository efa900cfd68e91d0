"""Metrics of a model file's `eval_metrics_fn`: metrics or functions, for the whole model or for one of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from elasticcb.errors import ModelFileError


class MeanOfFunction(keras.metrics.Mean):
    """The mean over records of `function(labels, predictions)`.

    The function may return one number per record, or one for the batch, which is weighted by the batch size.
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        super().__init__(name=name)
        self._function = function

    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:
        value = keras.ops.cast(self._function(labels, predictions), self.dtype)
        if len(value.shape):
            super().update_state(value, sample_weight)
        else:
            super().update_state(value, keras.ops.shape(keras.tree.flatten(predictions)[0])[0])


def metrics_by_output(
    eval_metrics: Mapping[str, Any], output: str | None = None
) -> Iterator[tuple[str, keras.metrics.Metric, str | None]]:
    """Yields each metric with its name in the results and its output; None: all outputs.

    Args:
        output: the output that they belong to, in a mapping by outputs.

    Raises `ModelFileError` for anything but a metric or a function.
    """
    for name, metric in eval_metrics.items():
        key = name if output is None else f"{output}_{name}"
        if isinstance(metric, Mapping) and output is None:
            yield from metrics_by_output(metric, name)
        elif isinstance(metric, keras.metrics.Metric):
            metric.name = name
            yield key, metric, output
        elif callable(metric):
            yield key, MeanOfFunction(metric, name), output
        else:
            raise ModelFileError(
                f"eval_metrics_fn() returned {metric!r} as the metric {key!r}. Expected a keras.metrics.Metric or a "
                "function of (labels, predictions)."
            )


def part_of_output(values: Any, output: str | None, names: Sequence[str]) -> Any:
    """The part of labels or predictions that belongs to an output; all of them if they have no parts."""
    if output is None:
        return values
    if isinstance(values, (list, tuple)) and len(values) == len(names):
        values = dict(zip(names, values, strict=True))
    if not isinstance(values, Mapping):
        return values
    if output not in values:
        raise ModelFileError(
            f"eval_metrics_fn() has metrics for the unknown output {output!r}. The model's outputs and labels are: "
            f"{', '.join(map(str, values))}."
        )
    return values[output]
