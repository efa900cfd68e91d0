"""The state of one metric, the values of its variables: the state over several tasks from the states of each. And the
metrics of a model file's `eval_metrics_fn`: for the whole model or for one of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from elasticcb.errors import ModelFileError, user_traceback


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


States = Sequence[Sequence[np.ndarray]]  # of tasks, or batches


class LastValue(keras.metrics.Metric):
    """The value of the last batch, and where its task begins in the data."""

    def __init__(self, name: str, shape: tuple[int, ...] = ()) -> None:
        super().__init__(name=name)
        shape = shape if None not in shape else ()
        self.value = self.add_variable(shape, "zeros", name="value")
        self.start = self.add_variable((), "zeros", dtype="int64", name="start")

    def update_state(self, value: Any) -> None:
        value = keras.ops.cast(value, self.value.dtype)
        # An array whose size changes from batch to batch has no place in a variable.
        self.value.assign(value if tuple(value.shape) == tuple(self.value.shape) else keras.ops.mean(value))

    def result(self) -> Any:
        return self.value.value


def last_of(tasks: States) -> list[np.ndarray]:
    """The state of the last of several tasks, or batches in order."""
    starts = [int(state[1]) for state in tasks]
    return list(tasks[max(range(len(tasks)), key=lambda place: (starts[place], place))])


def placed(state: Sequence[np.ndarray], start: int) -> list[np.ndarray]:
    """The state of a `LastValue` over a task whose records begin at `start`."""
    return [state[0], np.asarray(start, np.int64)]


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


def trial_predictions(labels: Any, shapes: Any) -> list[Any]:
    """Three batches of made-up predictions of these shapes and dtypes; those of the second agree with the labels, where
    it is clear how. A maximum of errors would be a sum if the others were not two."""
    generator = np.random.default_rng(0)

    def random(like: Any) -> Any:
        if "float" not in like.dtype:
            return keras.ops.convert_to_tensor(generator.integers(0, 2, like.shape), like.dtype)
        return keras.ops.convert_to_tensor(generator.uniform(0.05, 0.95, like.shape), like.dtype)

    def right(like: Any, label: Any) -> Any:
        label, values = keras.ops.convert_to_tensor(label), random(like)
        if tuple(label.shape) == tuple(like.shape):
            return keras.ops.cast(label, like.dtype)
        flat = label[..., 0] if label.shape[-1:] == (1,) else label
        return values * 0.05 + keras.ops.one_hot(keras.ops.cast(flat, "int32"), like.shape[-1], dtype=like.dtype)

    first = keras.tree.map_structure(random, shapes)
    try:
        second = keras.tree.map_structure(right, shapes, labels)
    except Exception:  # labels of another structure, or other than classes
        second = keras.tree.map_structure(random, shapes)
    return [first, second, keras.tree.map_structure(random, shapes)]


def summable_states(
    metrics: Mapping[str, keras.metrics.Metric],
    reset: Callable[[], None],
    update: Callable[[Any], None],
    batches: Sequence[Any],
) -> set[str]:
    """The metrics whose whole state is in variables, and whose states of batches add up to the state of all batches."""

    def after(*given: Any) -> dict[str, list[np.ndarray]]:
        reset()
        for batch in given:
            update(batch)
        return {name: [np.array(each.numpy(), "float64") for each in unit.variables] for name, unit in metrics.items()}

    none, *single = after(), *map(after, batches)
    whole = after(*batches)
    results = {name: unit.result() for name, unit in metrics.items()}
    reset()
    found = set()
    for name, metric in metrics.items():
        total = [np.sum(values, axis=0) for values in zip(*(states[name] for states in single), strict=True)]
        is_tried = bool(total) and all(np.any(value) for value in total)  # zeros show nothing
        if is_tried and not any(map(np.any, none[name])) and _are_close(total, whole[name]):
            assign(metric, total)
            if _are_close(*(keras.tree.flatten(each) for each in (metric.result(), results[name]))):
                found.add(name)
    return found


def keeping_states(
    metrics: Mapping[str, keras.metrics.Metric],
    reset: Callable[[], None],
    update: Callable[[Any], None],
    batches: Sequence[Any],
) -> list[tuple[str, Any, Any]]:
    """The metrics that `reset_state` does not set back, and their results after a batch, at first and once more."""

    def after(batch: Any) -> tuple[dict[str, _AtReset], dict[str, Any]]:
        reset()
        at_first = {name: _AtReset.of(unit) for name, unit in metrics.items()}
        update(batch)
        return at_first, {name: unit.result() for name, unit in metrics.items()}

    (at_first, results), _, (again, others) = (after(batches[place]) for place in (0, 1, 0))
    reset()
    found = []
    for name in metrics:
        pair = [keras.tree.flatten(each[name]) for each in (results, others)]
        if not at_first[name].is_same(again[name]) and not _are_close(*pair):
            found.append((name, results[name], others[name]))
    return found


class _AtReset(NamedTuple):
    """Variables, and attributes that are numbers."""

    variables: list[np.ndarray]
    numbers: dict[str, Any]

    @classmethod
    def of(cls, metric: keras.metrics.Metric) -> _AtReset:
        numbers = {name: value for name, value in vars(metric).items() if isinstance(value, (int, float))}
        return cls([np.array(variable.numpy()) for variable in metric.variables], numbers)

    def is_same(self, other: _AtReset) -> bool:
        shared = self.numbers.keys() & other.numbers.keys()  # some are set by the first batch
        return all(self.numbers[name] == other.numbers[name] for name in shared) and _are_close(
            self.variables, other.variables
        )


def _are_close(values: Sequence[Any], others: Sequence[Any]) -> bool:
    arrays = [
        (keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b)) for a, b in zip(values, others, strict=True)
    ]
    return all(a.shape == b.shape and np.allclose(a, b, rtol=1e-4, equal_nan=True) for a, b in arrays)


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


def has_state(metric: keras.metrics.Metric, values: Sequence[np.ndarray]) -> bool:
    """Whether `values`, converted as by `assign`, are the state of a metric."""
    pairs = zip((np.asarray(variable.numpy()) for variable in metric.variables), values, strict=True)
    return all(own.tobytes() == np.asarray(value, own.dtype).tobytes() for own, value in pairs)


def result_of(metric: keras.metrics.Metric, values: Sequence[np.ndarray]) -> Any:
    """The result of a metric with another state than its own."""
    if type(metric).result is keras.metrics.Mean.result:  # of most, many times faster than setting the variables
        total, count = values
        return total / count if count else 0.0
    before = [np.array(variable.numpy()) for variable in metric.variables]
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
