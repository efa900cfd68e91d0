"""Metrics whose records are spread over workers: each record counts once, in whatever task it was.

A worker accumulates the states of a task's metrics and sends them; the master merges the states of
all tasks and reads the results. Statistics such as AUC so equal those of one process, which averages
of per-batch results would not. How a metric travels is its `MetricTransport`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

import keras
import numpy as np
from keras.src.trainers.compile_utils import CompileMetrics

from elasticcb.errors import ModelFileError, user_traceback
from elasticcb.model.eval_metrics import MeanOfFunction, metrics_by_output, part_of_output
from elasticcb.optimizers.step_logs import flat_logs, is_overridden, recorded_results

logger = logging.getLogger(__name__)

_REPLACED = ("compute_metrics", "train_step", "test_step")  # methods of the model, while it is observed
_MONITORS = (keras.callbacks.EarlyStopping, keras.callbacks.ModelCheckpoint, keras.callbacks.ReduceLROnPlateau)


class MetricTransport(Enum):
    """How the statistics of a metric get to the master."""

    SUM = "sum"  # its variables add up: everything that Keras ships
    MERGE = "merge"  # it brings `merge_state(metrics)`
    OUTPUTS = "outputs"  # labels, predictions and weights travel, and the master updates the metric


@dataclass(frozen=True)
class _Unit:
    """A metric that travels by itself.

    `key` is its name among the results; `output` is the output of the model that `eval_metrics_fn` gives
    it for. `by_model` tells metrics that the model updates itself.
    """

    name: str  # the same in every process
    metric: keras.metrics.Metric
    key: str
    output: str | None = None
    by_model: bool = False
    compiled: bool = False  # one of `compile(metrics=...)`
    logged_by: str = ""  # "train" or "test": the mean of a value among the logs of the model's own step


class ModelMetrics:
    """The metrics of a model: its loss, those it was compiled with, and those of `eval_metrics_fn`.

    Makes `model.compute_metrics` update and return the latter too, so that Keras's own `train_step`
    and `test_step` feed them. A `train_step` or `test_step` of the model's own says by what it returns which
    logs there are: results of metrics, and plain values. Of these the mean over all batches is what counts
    (`fit` shows those of an epoch's last batch, and several workers have no last batch).

    Args:
        model: a model; its metrics must be built (`Backend.build`) before states are read.
        eval_metrics: `{name: metric or function}` or `{output: {name: metric or function}}`.

    Raises:
        ModelFileError: `eval_metrics` holds something else.
    """

    def __init__(self, model: keras.Model, eval_metrics: Mapping[str, Any]) -> None:
        self._model = model
        self._selected = list(metrics_by_output(eval_metrics))
        if len({id(metric) for _, metric, _ in self._selected}) < len(self._selected):
            raise ModelFileError(
                "eval_metrics_fn() gives the same metric object twice; its records would be mixed. Make one "
                f"object for each of {', '.join(key for key, _, _ in self._selected)}."
            )
        self._before = {name: vars(model)[name] for name in _REPLACED if name in vars(model)}
        self._model_compute_metrics = model.compute_metrics
        model.compute_metrics = self._compute_metrics
        self._compiled_keys: tuple[str, ...] = ()  # names of the results of `compile(metrics=...)`
        self._warned: set[str] = set()
        # By step and key of its logs: a unit, and the key in its result where that is a dict.
        self._logs: dict[str, dict[str, tuple[str, str | None]]] = {}
        self._logged: dict[str, dict[str, keras.metrics.Mean]] = {"train": {}, "test": {}}
        self._carried: dict[str, list[Any]] | None = None
        for step in self._logged:
            if is_overridden(model, f"{step}_step"):
                setattr(model, f"{step}_step", self._observed(step, _plain_function(getattr(model, f"{step}_step"))))

    def release(self) -> None:
        """Gives the model its own methods back."""
        for name in _REPLACED:
            vars(self._model).pop(name, None)
        vars(self._model).update(self._before)

    def give_directions(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        """Tells callbacks with `mode="auto"` whether what they monitor is to grow.

        Keras looks for it among the metrics of `compile` alone, and not among those of `eval_metrics_fn`.
        """
        directions = {key: getattr(metric, "_direction", "") for key, metric, _ in self._selected}
        for callback in callbacks:
            if isinstance(callback, _MONITORS) and callback.mode == "auto":
                direction = directions.get(callback.monitor.removeprefix("val_"), "")
                callback.mode = {"up": "max", "down": "min"}.get(direction, "auto")

    def _observed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            """As the model's: of `data`; or of a state and `data`, which gives the logs and the next state."""
            with recorded_results([*self._model.metrics, *(metric for _, metric, _ in self._selected)]) as recorded:
                result = function(*given)
            self._note_logs(step, flat_logs(result if len(given) == 1 else result[0]), recorded)
            return result

        return run

    @contextlib.contextmanager
    def carried(self, states: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, list[Any]]]:
        """For a step that is given its state, instead of changing variables: the metrics that Keras does not count as
        the model's start in it from `states`; it gives what they come to.

        Args:
            states: of the units of `carried_units`, tensors.
        """
        self._carried = {name: list(values) for name, values in states.items()}
        try:
            yield self._carried
        finally:
            self._carried = None

    def carried_units(self) -> dict[str, keras.metrics.Metric]:
        """Those: of `eval_metrics_fn`, and the means of logs."""
        return {unit.name: unit.metric for unit in self._units() if not unit.by_model or unit.logged_by}

    def _updated(self, metric: keras.metrics.Metric, update: Callable[[], None]) -> Any:
        """The result of a metric after an update, where the step's state has it."""
        if self._carried is None:
            update()
            return metric.result()
        name = next(unit.name for unit in self._units() if unit.metric is metric)
        before = self._carried.get(name) or [variable.value for variable in metric.variables]
        with keras.StatelessScope(list(zip(metric.variables, before, strict=True))) as scope:
            update()
            result = metric.result()
            self._carried[name] = [scope.get_current_value(variable) for variable in metric.variables]
        return result

    def _note_logs(self, step: str, logs: Mapping[str, Any], recorded: list[tuple[Any, Any, str | None]]) -> None:
        """Finds out what the logs of a step are, from the results that metrics gave while it ran."""
        names = {id(unit.metric): unit.name for unit in self._units()}
        compiled = {unit.key: unit.name for unit in self._units() if unit.compiled}
        found: dict[str, tuple[str, str | None]] = {}
        for key, value in logs.items():
            for result, metric, part in recorded:
                if result is value and isinstance(metric, CompileMetrics) and part in compiled:
                    found[key] = compiled[part], None
                elif result is value and id(metric) in names:
                    found[key] = names[id(metric)], part
            if key not in found:
                mean = self._logged[step].get(key)
                if mean is None:
                    mean = self._logged[step][key] = _outside_of_traces(functools.partial(keras.metrics.Mean, key))
                self._updated(mean, functools.partial(mean.update_state, value))
                found[key] = f"{step}/{key}", None
        self._logs[step] = found

    def _compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        results = dict(self._model_compute_metrics(x, y, y_pred, sample_weight))
        for key, metric, output in self._selected:
            update = functools.partial(self._update, metric, output, y, y_pred, sample_weight)
            results[key] = self._updated(metric, update)
        return results

    def _update(self, metric: Any, output: str | None, y: Any, y_pred: Any, sample_weight: Any) -> None:
        names = getattr(self._model, "output_names", None) or ()
        labels, predictions = part_of_output(y, output, names), part_of_output(y_pred, output, names)
        weight = sample_weight.get(output) if isinstance(sample_weight, Mapping) else sample_weight
        metric.update_state(labels, predictions, sample_weight=weight)

    def _units(self) -> list[_Unit]:
        found: dict[str, _Unit] = {}

        def add(metric: keras.metrics.Metric, key: str, **values: Any) -> None:
            name = _unused(key, found)
            found[name] = _Unit(name, metric, key, **values)

        for metric in self._model.metrics:
            if isinstance(metric, CompileMetrics):
                if metric.built and not self._compiled_keys:
                    self._compiled_keys = tuple(metric.result())  # which goes through them in the same order
                for key, part in zip(self._compiled_keys, metric.metrics, strict=False):
                    add(part, key, by_model=True, compiled=True)
            else:
                add(metric, metric.name, by_model=True)
        for key, metric, output in self._selected:
            add(metric, key, output=output)
        for step, means in self._logged.items():
            for key, mean in sorted(means.items()):
                found[f"{step}/{key}"] = _Unit(f"{step}/{key}", mean, key, by_model=True, logged_by=step)
        return list(found.values())

    def units(self) -> dict[str, keras.metrics.Metric]:
        """Metrics by a name that is the same in every process."""
        return {unit.name: unit.metric for unit in self._units()}

    def transports(self) -> dict[str, MetricTransport]:
        """How each unit travels."""
        return {unit.name: self._transport(unit) for unit in self._units()}

    def _transport(self, unit: _Unit) -> MetricTransport:
        if _adds_up(unit.metric):
            return MetricTransport.SUM
        if hasattr(unit.metric, "merge_state"):
            return MetricTransport.MERGE
        if unit.compiled or not unit.by_model:
            return MetricTransport.OUTPUTS
        if unit.name not in self._warned:
            self._warned.add(unit.name)
            logger.warning(
                "The metric %r (%s) is updated by the model itself and has no merge_state(metrics): the states "
                "of different workers are added up.", unit.name, type(unit.metric).__name__,
            )  # fmt: skip
        return MetricTransport.SUM

    @contextlib.contextmanager
    def kept_outputs(self) -> Iterator[list[Any]]:
        """What the metrics that travel as outputs need of a step in it: labels, predictions and perhaps weights."""
        outputs: list[Any] = []
        if MetricTransport.OUTPUTS not in self.transports().values():
            yield outputs
            return
        inner = self._model.compute_metrics

        def keep(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            outputs[:] = (y, y_pred) if sample_weight is None else (y, y_pred, sample_weight)
            return inner(x, y, y_pred, sample_weight)

        self._model.compute_metrics = keep
        try:
            yield outputs
        finally:
            self._model.compute_metrics = inner

    def reset(self) -> None:
        """Back to no records; works inside a `tf.function`."""
        for metric in self.units().values():
            metric.reset_state()

    def states(self) -> dict[str, list[np.ndarray]]:
        """The present states of all units that do not send outputs."""
        return {
            unit.name: [variable.numpy() for variable in unit.metric.variables]
            for unit in self._units()
            if self._transport(unit) is not MetricTransport.OUTPUTS
        }

    def training_units(self) -> frozenset[str]:
        """The units in the logs of training. Outputs of training batches don't travel: the states of a metric that
        needs them are added up, if its `reset_state` leaves zeros. Resets all."""
        self.reset()
        names = set()
        for unit in self._units():
            if self._transport(unit) is not MetricTransport.OUTPUTS:
                names.add(unit.name)
            elif not any(np.any(np.asarray(variable.value)) for variable in unit.metric.variables):
                names.add(unit.name)
                logger.info("In training the states of the metric %r are added up over batches.", unit.name)
            else:
                logger.warning(
                    "The metric %r (%s) is left out of the logs of training: its reset_state() leaves other values "
                    "than zero, so its states can't be added up over the batches of several workers.",
                    unit.name, type(unit.metric).__name__,
                )  # fmt: skip
        return frozenset(names)

    @property
    def merging_units(self) -> frozenset[str]:
        """The units whose states are put together by the metric itself."""
        return frozenset(name for name, transport in self.transports().items() if transport is MetricTransport.MERGE)

    def merge_states(self, name: str, tasks: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """The state of one unit over the records of several tasks, or batches."""
        metric = self.units()[name]
        if self.transports()[name] is not MetricTransport.MERGE:
            return [np.sum(values, axis=0, dtype=_wide(values[0])) for values in zip(*tasks, strict=True)]
        # Two copies, so that `merge_state` meets metrics that are not those of the model.
        total, other = _copy(metric), _copy(metric)
        for number, task in enumerate(tasks):
            _assign(other if number else total, task)
            if number:
                total.merge_state([other])
        return [np.asarray(variable.value) for variable in total.variables]

    def load(self, states: Mapping[str, Sequence[np.ndarray]], batches: Iterable[Sequence[Any]] = ()) -> None:
        """Sets the metrics to statistics that came from workers.

        Args:
            states: by unit, values of its variables; a unit that is missing is reset.
            batches: `(labels, predictions[, sample_weight])` of each, for units that need them.
        """
        self.reset()
        units = self._units()
        travelling = [unit for unit in units if self._transport(unit) is MetricTransport.OUTPUTS]
        for batch in batches:
            labels, predictions, weight = (*batch, None)[:3]
            for metric in self._model.metrics:
                if isinstance(metric, CompileMetrics) and any(unit.compiled for unit in travelling):
                    metric.update_state(labels, predictions, weight)
            for unit in travelling:
                if not unit.by_model:
                    self._update(unit.metric, unit.output, labels, predictions, weight)
        # After the outputs, which `compile(metrics=...)` feeds to all of its metrics alike.
        for unit in units:
            if unit.name in states:
                _assign(unit.metric, states[unit.name])

    def results(self, among: Collection[str] | None = None, step: str = "test") -> dict[str, float]:
        """Present results by name, of all units or of those named; a result that is a dict gives its items.

        Args:
            step: "train" or "test"; where the model has a step of its own, the results are those that it logs.
        """
        units = {unit.name: unit for unit in self._units() if among is None or unit.name in among}
        results: dict[str, Any] = {}
        if step in self._logs:
            for key, (name, part) in self._logs[step].items():
                if name in units:
                    result = units[name].metric.result()
                    results[key] = result if part is None else result[part]
        else:
            for unit in units.values():
                result = unit.metric.result()
                if not unit.logged_by:
                    results.update(result if isinstance(result, dict) else {unit.key: result})
        return {name: to_number(value) for name, value in results.items()}

    def nested_results(self, among: Collection[str] | None = None) -> dict[str, Any]:
        """As `results` of an evaluation, with the metrics of an output under the output's name."""
        flat = self.results(among)
        nested: dict[str, Any] = dict(flat)
        for key, metric, output in self._selected:
            if output is not None and key in nested:
                nested.setdefault(output, {})[metric.name] = nested.pop(key)
        return nested


def _plain_function(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step without its @tf.function: the gradients of a function within the step can't be taken out of it."""
    inner = getattr(step, "python_function", None)
    if inner is None:
        return step
    import tensorflow as tf

    return tf.autograph.to_graph(inner)


def _outside_of_traces(make: Callable[[], Any]) -> Any:
    """What `make` gives, not as a part of the step that is traced: each thread has traces, and scopes, of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def to_number(value: Any) -> Any:
    """A float for a number, as in Keras's logs; a list for an array."""
    array = np.asarray(value)
    if array.ndim:
        return array.tolist()
    item = array.item()
    return float(item) if isinstance(item, (bool, int, float)) else item


def _adds_up(metric: keras.metrics.Metric) -> bool:
    """Whether summing its variables over tasks gives the statistics of all their records.

    True for what Keras ships; a user's subclass stays so as long as it does not change how its state
    is kept.
    """
    for kind in type(metric).__mro__:
        if {"update_state", "reset_state", "merge_state"} & set(vars(kind)):
            return kind.__module__.startswith("keras.") or kind is MeanOfFunction
    return False


def _copy(metric: keras.metrics.Metric) -> keras.metrics.Metric:
    try:
        return type(metric).from_config(metric.get_config())
    except Exception as error:
        raise ModelFileError(
            f"The metric {metric.name!r} has merge_state(metrics), and so is copied to merge the states of tasks; "
            f"{type(metric).__name__}.from_config(get_config()) raised {type(error).__name__}: {error}. Give it a "
            "get_config() that holds what its __init__ takes.",
            user_traceback(error),
        ) from error


def _assign(metric: keras.metrics.Metric, values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(metric.variables, values, strict=True):
        variable.assign(value)


def _wide(array: np.ndarray) -> Any:
    """A dtype in which the order of summing does not show."""
    return np.float64 if np.asarray(array).dtype.kind in "fV" else None  # V: bfloat16


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
