"""Metrics over records that are spread over workers: each record counts once, whichever task it was in.

A worker accumulates the states of a task's metrics and sends them; the master merges the states of all tasks and
computes the results. So statistics such as AUC equal those of a single process, unlike averages of per-batch results.
`MetricTransport` says how a metric is sent.
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

from elasticcb.errors import CallbackError, ModelFileError, describe
from elasticcb.keras_private import CompileMetrics
from elasticcb.model.metric_messages import OUTPUTS, PROGRESSIVE, outputs_in
from elasticcb.model.metric_states import (
    LastValue,
    adds_up,
    assign,
    keeping_states,
    last_of,
    merged,
    metrics_by_output,
    part_of_output,
    placed,
    result_of,
    summable_states,
    summed,
    trial_predictions,
)
from elasticcb.optimizers.step_logs import flat_logs, is_overridden, recorded_results
from elasticcb.settings import Mode

logger = logging.getLogger(__name__)

_REPLACED = ("compute_metrics", "train_step", "test_step")  # methods of the model, while it is observed
_MONITORS = (keras.callbacks.EarlyStopping, keras.callbacks.ModelCheckpoint, keras.callbacks.ReduceLROnPlateau)


class MetricTransport(Enum):
    """How the statistics of a metric are sent to the master."""

    SUM = "sum"  # its variables are summed: all metrics of Keras
    MERGE = "merge"  # it implements `merge_state(metrics)`
    OUTPUTS = "outputs"  # labels, predictions and weights are sent, and the master updates the metric
    LAST = "last"  # the value of the last batch in the order of the data: a plain value in the logs of a step


@dataclass(frozen=True)
class _Unit:
    """A separately sent metric.

    `key` is its name in the results; `output` is its output in `eval_metrics_fn`. `by_model` marks metrics that the
    model updates itself.
    """

    name: str  # the same in every process
    metric: keras.metrics.Metric
    key: str
    output: str | None = None
    by_model: bool = False
    compiled: bool = False  # one of `compile(metrics=...)`
    logged_by: str = ""  # "train" or "test": a plain value in the logs of the model's own step


class ModelMetrics:
    """The metrics of a model: its loss, its compiled metrics, and those of `eval_metrics_fn`.

    Extends `model.compute_metrics` to update and return the latter as well, so that Keras's own `train_step` and
    `test_step` update them. As in Keras, the logs of an epoch or pass are the results of all metrics if a step returns
    their names, else what the step returned for the last batch: results of metrics, and plain values.

    Args:
        model: a model; its metrics must be built (`Backend.build`) before states are read.
        eval_metrics: `{name: metric or function}` or `{output: {name: metric or function}}`.

    Attributes:
        own_steps: "train" or "test", for steps whose logs the model's own methods determine.
        replayed: the units that the master updates with the outputs of each training batch, from `try_out`.
        log_order: by step, for each key in logs, the one by which Keras sorts it: of the dict that it is in.

    Raises:
        ModelFileError: `eval_metrics` contains something else.
    """

    def __init__(self, model: keras.Model, eval_metrics: Mapping[str, Any]) -> None:
        self._model = model
        self._selected = list(metrics_by_output(eval_metrics))
        if len({id(metric) for _, metric, _ in self._selected}) < len(self._selected):
            raise ModelFileError(
                "eval_metrics_fn() returned the same metric object twice, so its records would be mixed. Create one "
                f"object for each of {', '.join(key for key, _, _ in self._selected)}."
            )
        self._before = {name: vars(model)[name] for name in _REPLACED if name in vars(model)}
        own_metrics = is_overridden(model, "compute_metrics")
        self._model_compute_metrics = model.compute_metrics
        model.compute_metrics = self._compute_metrics
        self._compiled_keys: tuple[str, ...] = ()  # names of the results of `compile(metrics=...)`
        self._warned: set[str] = set()
        # By step: the keys that it returns; and by key of its logs a unit, and the key in its result if that is a dict.
        self._logs: dict[str, tuple[frozenset[str], dict[str, tuple[str, str | None]]]] = {}
        self._predictions: Any = None  # shapes and dtypes, in a step
        self.replayed: frozenset[str] = frozenset()
        self._logged: dict[str, dict[str, LastValue]] = {"train": {}, "test": {}}
        self._carried: dict[str, list[Any]] | None = None
        self.log_order: dict[str, dict[str, str]] = {"train": {}, "test": {}}
        self.own_steps = frozenset(step for step in self._logged if own_metrics or is_overridden(model, f"{step}_step"))
        for step in self.own_steps:
            setattr(model, f"{step}_step", self._observed(step, _plain_function(getattr(model, f"{step}_step"))))

    def release(self) -> None:
        """Restores the model's own methods."""
        for name in _REPLACED:
            vars(self._model).pop(name, None)
        vars(self._model).update(self._before)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which the model has its own methods."""
        replaced = {name: vars(self._model)[name] for name in _REPLACED if name in vars(self._model)}
        self.release()
        try:
            yield
        finally:
            vars(self._model).update(replaced)

    def give_directions(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        """Tells callbacks with `mode="auto"` whether higher values of their metric are better.

        Keras looks only at the metrics of `compile`, not at those of `eval_metrics_fn`.
        """
        directions = {key: getattr(metric, "_direction", "") for key, metric, _ in self._selected}
        for callback in callbacks:
            if isinstance(callback, _MONITORS) and callback.mode == "auto":
                direction = directions.get(callback.monitor.removeprefix("val_"), "")
                callback.mode = {"up": "max", "down": "min"}.get(direction, "auto")

    def _observed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            """Like the model's method: takes `data`; or takes a state and `data`, and returns the logs and the next
            state."""
            with recorded_results([*self._model.metrics, *(metric for _, metric, _ in self._selected)]) as recorded:
                result = function(*given)
            self._note_logs(step, (result if len(given) == 1 else result[0]) or {}, recorded)
            return result

        return run

    @contextlib.contextmanager
    def carried(self, states: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, list[Any]]]:
        """For a step that takes and returns its state instead of changing variables: metrics that Keras does not count
        as the model's start from `states`; returns their new states.
        """
        self._carried = {name: list(values) for name, values in states.items()}
        try:
            yield self._carried
        finally:
            self._carried = None

    def carried_units(self) -> dict[str, keras.metrics.Metric]:
        """The metrics of `eval_metrics_fn`, and plain values of logs."""
        return {unit.name: unit.metric for unit in self._units() if not unit.by_model or unit.logged_by}

    def _updated(self, metric: keras.metrics.Metric, update: Callable[[], None]) -> Any:
        """The result of a metric after an update, if the step's state has it."""
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
        """Determines the logs of a step from the results of metrics while it ran."""
        names = {id(unit.metric): unit.name for unit in self._units()}
        compiled = {unit.key: unit.name for unit in self._units() if unit.compiled}
        found: dict[str, tuple[str, str | None]] = {}
        for key, value in flat_logs(logs).items():
            for result, metric, part in recorded:
                if result is value and isinstance(metric, CompileMetrics) and part in compiled:
                    found[key] = compiled[part], None
                elif result is value and id(metric) in names:
                    found[key] = names[id(metric)], part
            if key not in found:
                last = self._logged[step].get(key)
                if last is None:
                    last = _outside_of_traces(functools.partial(LastValue, key, tuple(np.shape(value))))
                    self._logged[step][key] = last
                self._updated(last, functools.partial(last.update_state, value))
                found[key] = f"{step}/{key}", None
        self._logs[step] = frozenset(logs), found
        self.log_order[step] = {key: top for top, value in logs.items() for key in flat_logs({top: value})}

    def _compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        if self._predictions is None:
            self._predictions = keras.tree.map_structure(_shape_of, y_pred)
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
                    self._compiled_keys = tuple(metric.result())  # which iterates over them in the same order
                for key, part in zip(self._compiled_keys, metric.metrics, strict=False):
                    add(part, key, by_model=True, compiled=True)
            else:
                add(metric, metric.name, by_model=True)
        for key, metric, output in self._selected:
            add(metric, key, output=output)
        for step, values in self._logged.items():
            for key, last in sorted(values.items()):
                found[f"{step}/{key}"] = _Unit(f"{step}/{key}", last, key, by_model=True, logged_by=step)
        return list(found.values())

    def units(self) -> dict[str, keras.metrics.Metric]:
        """Metrics by a name that is the same in every process."""
        return {unit.name: unit.metric for unit in self._units()}

    def transports(self) -> dict[str, MetricTransport]:
        """How each unit is sent."""
        return {unit.name: self._transport(unit) for unit in self._units()}

    def _transport(self, unit: _Unit) -> MetricTransport:
        if unit.logged_by:
            return MetricTransport.LAST
        if adds_up(unit.metric):
            return MetricTransport.SUM
        if hasattr(unit.metric, "merge_state") and unit.metric.variables:
            return MetricTransport.MERGE
        if unit.compiled or not unit.by_model:
            return MetricTransport.OUTPUTS
        if not unit.metric.variables and self._is_logged(unit):
            raise ModelFileError(
                f"The metric {unit.metric.name!r} ({type(unit.metric).__name__}) has no variables, so its state on the "
                "workers can't be read, and the model updates it itself. Give it to compile(metrics=[…]), or keep its "
                "state in variables created by self.add_weight."
            )
        if unit.name not in self._warned:
            self._warned.add(unit.name)
            logger.warning(
                "The metric %r (%s) is updated by the model itself and has no merge_state(metrics), so the states of "
                "different workers are summed.", unit.name, type(unit.metric).__name__,
            )  # fmt: skip
        return MetricTransport.SUM

    def _is_logged(self, unit: _Unit) -> bool:
        logs = [found for _, found in self._logs.values()]
        return not logs or any(name == unit.name for step in logs for name, _ in step.values())

    @contextlib.contextmanager
    def kept_outputs(self, mode: Mode) -> Iterator[list[Any]]:
        """The values of a step for metrics that are sent as outputs: labels, predictions and, if used, weights."""
        outputs: list[Any] = []
        if not (self.replayed if mode is Mode.TRAINING else MetricTransport.OUTPUTS in self.transports().values()):
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
        """Resets all metrics; works inside a `tf.function`."""
        for metric in self.units().values():
            metric.reset_state()

    def begin_part(self, mode: Mode) -> None:
        """Resets the units whose states are sent for each batch of training, or task of evaluation; works inside a
        `tf.function`. The others continue until `reset`: hooks see whole epochs and passes."""
        for unit in self._units():
            if not self._goes_on(unit, mode):
                unit.metric.reset_state()

    def _goes_on(self, unit: _Unit, mode: Mode) -> bool:
        if mode is Mode.TRAINING:
            return unit.name in self.replayed
        return self._transport(unit) is MetricTransport.OUTPUTS

    def states(self) -> dict[str, list[np.ndarray]]:
        """The current states of all units that do not send outputs."""
        return {
            unit.name: [variable.numpy() for variable in unit.metric.variables]
            for unit in self._units()
            if self._transport(unit) is not MetricTransport.OUTPUTS
        }

    def try_out(self, batch: Any) -> frozenset[str]:
        """The units whose training states can't be summed over batches, tried with a batch. Resets all units.

        Raises `ModelFileError` for a metric that `reset_state` does not set back.
        """
        own = {unit.name: unit.metric for unit in self._units() if self._transport(unit) is MetricTransport.OUTPUTS}
        summable: set[str] = set()
        keeping: list[tuple[str, Any, Any]] = []
        if own:
            _, labels, weight = keras.utils.unpack_x_y_sample_weight(batch)
            try:
                trials = [(labels, each, weight) for each in trial_predictions(labels, self._predictions)]
                keeping = keeping_states(own, self.reset, self._replay, trials)  # first: it may keep what it has seen
                summable = summable_states(own, self.reset, self._replay, trials)
            except Exception as error:  # of a metric that does not accept these predictions
                logger.info("How metrics keep their state is unknown: %s", describe(error))
        for name, first, second in keeping:
            raise ModelFileError(
                f"The metric {name!r} ({type(own[name]).__name__}) is not set back by its reset_state(): for the same "
                f"batch, its result is {_shown(first)} at first and {_shown(second)} later. Metrics of a cluster are "
                "computed from scratch for each epoch and pass. Set everything back in reset_state(); a callback can "
                "keep what is to last longer."
            )
        replayed = own.keys() - summable
        if replayed:
            logger.info("Updated here, with the outputs of all training batches: %s", ", ".join(sorted(replayed)))
        self.reset()
        return frozenset(replayed)

    def training_units(self) -> frozenset[str]:
        """What workers report of training: the names in `States`."""
        names = self.units().keys() - self.replayed
        return frozenset(names | {OUTPUTS} if self.replayed else names)

    def check_progressive(self) -> None:
        """Raises `CallbackError` if a batch can't be evaluated before it is trained: metrics without mergeable state
        would count it twice."""
        found = [name for name, transport in self.transports().items() if transport is MetricTransport.OUTPUTS]
        if found:
            raise CallbackError(
                f"ProgressiveMetrics needs metrics with mergeable state, which {', '.join(found)} have not. Remove "
                "ProgressiveMetrics or these metrics, or give them merge_state(metrics)."
            )

    def states_before(self) -> dict[str, list[np.ndarray]]:
        """Like `states`, of a batch that was evaluated before it is trained: names in `States` for that."""
        transports = self.transports()
        states = self.states().items()
        return {f"{PROGRESSIVE}{name}": own for name, own in states if transports[name] is not MetricTransport.LAST}

    @property
    def merging_units(self) -> frozenset[str]:
        """The names in `States` whose values can't be summed."""
        merging = (MetricTransport.MERGE, MetricTransport.LAST)
        names = frozenset(name for name, transport in self.transports().items() if transport in merging)
        names |= {f"{PROGRESSIVE}{name}" for name in names}
        return names | {OUTPUTS} if self.replayed else names

    def merge_states(self, name: str, tasks: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """The state of one unit over the records of several tasks, or batches in order."""
        if name == OUTPUTS:
            return [array for task in tasks for array in task]
        name = name.removeprefix(PROGRESSIVE)
        transport = self.transports()[name]
        if transport is MetricTransport.LAST:
            return last_of(tasks)
        if transport is MetricTransport.MERGE:
            return merged(self.units()[name], tasks)
        return summed(tasks)

    def of_task(self, states: Mapping[str, Sequence[Any]], start: int) -> dict[str, list[Any]]:
        """The states over a task whose records begin at `start`, which decides what the last value is."""
        last = {name for name, transport in self.transports().items() if transport is MetricTransport.LAST}
        return {name: placed(own, start) if name in last else list(own) for name, own in states.items()}

    def load(self, states: Mapping[str, Sequence[np.ndarray]], batches: Iterable[Sequence[Any]] = ()) -> None:
        """Sets the metrics to statistics from workers.

        Args:
            states: values of variables by unit; missing units are reset.
            batches: `(labels, predictions[, sample_weight])` of each batch, for units that need them.
        """
        self.reset()
        for batch in [*batches, *outputs_in(states)]:
            self._replay(keras.tree.map_structure(_tensor, batch))
        # After the outputs, which `compile(metrics=...)` passes to all of its metrics.
        for unit in self._units():
            if unit.name in states:
                assign(unit.metric, states[unit.name])

    def show(self, states: Mapping[str, Sequence[np.ndarray]]) -> list[tuple[keras.metrics.Metric, Sequence[Any]]]:
        """Sets the units that have a state, without the others; all are reset if none has. Returns metrics and their
        states."""
        if not states:
            self.reset()
        found = self.units()
        shown = [(found[name], state) for name, state in (states or self.states()).items() if name in found]
        for metric, state in shown if states else ():
            assign(metric, state)
        return shown

    def _replay(self, batch: Sequence[Any]) -> None:
        """Updates the units that are sent as outputs, and all of `compile(metrics=...)` with them."""
        labels, predictions, weight = (*batch, None)[:3]
        travelling = [unit for unit in self._units() if self._transport(unit) is MetricTransport.OUTPUTS]
        for metric in self._model.metrics:
            if isinstance(metric, CompileMetrics) and any(unit.compiled for unit in travelling):
                metric.update_state(labels, predictions, weight)
        for unit in travelling:
            if not unit.by_model:
                self._update(unit.metric, unit.output, labels, predictions, weight)

    def results(self, among: Collection[str] | None = None, step: str = "test") -> dict[str, float]:
        """Current results by name, of all units or of the given ones; dict results are flattened."""
        units = [unit for unit in self._units() if among is None or unit.name in among]
        return self._named({unit.name: (unit, unit.metric.result()) for unit in units}, step)

    def results_of(self, states: Mapping[str, Sequence[np.ndarray]], step: str) -> dict[str, float]:
        """Results by name of metrics with these states, by unit; without plain values of the model's own step. The
        metrics themselves keep their states."""
        units = [unit for unit in self._units() if unit.name in states and not unit.logged_by]
        return self._named({unit.name: (unit, result_of(unit.metric, states[unit.name])) for unit in units}, step)

    def _named(self, found: Mapping[str, tuple[_Unit, Any]], step: str) -> dict[str, float]:
        results: dict[str, Any] = {}
        order = {}  # where Keras sorts the parts of a result
        for unit, result in found.values():
            if not unit.logged_by:
                results.update(result if isinstance(result, dict) else {unit.key: result})
                order.update(dict.fromkeys(result, unit.key) if isinstance(result, dict) else {})
        keys, logs = self._logs.get(step, (None, {}))
        if keys is not None and keys != self._metric_keys():
            results = {}
            for key, (name, part) in logs.items():
                if name in found:
                    result = found[name][1]
                    results[key] = result if part is None else result[part]
        else:
            self.log_order[step] |= order
            results = self.in_order(results, step)
        return {name: to_number(value) for name, value in results.items()}

    def in_order(self, logs: Mapping[str, Any], step: str = "train") -> dict[str, Any]:
        """Logs of a batch, an epoch or `evaluate` in Keras's order; `on_test_end` gets them sorted by name."""
        order = {**self.log_order["test"], **self.log_order["train"], **self.log_order[step]}
        return dict(sorted(logs.items(), key=lambda item: (order.get(item[0], item[0]), item[0])))

    def _metric_keys(self) -> set[str]:
        try:
            return set(self._model.get_metrics_result())
        except ValueError:  # metrics of `compile` that no step has used
            return set()

    def nested_results(self, among: Collection[str] | None = None) -> dict[str, Any]:
        """Like `results` of an evaluation, with the metrics of an output under the output's name."""
        flat = self.results(among)
        nested: dict[str, Any] = dict(flat)
        for key, metric, output in self._selected:
            if output is not None and key in nested:
                nested.setdefault(output, {})[metric.name] = nested.pop(key)
        return nested


def _plain_function(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step without its @tf.function: gradients computed inside a nested function can't be extracted."""
    inner = getattr(step, "python_function", None)
    if inner is None:
        return step
    import tensorflow as tf

    return tf.autograph.to_graph(inner)


def _outside_of_traces(make: Callable[[], Any]) -> Any:
    """The result of `make`, called outside of the traced step: each thread has its own traces and scopes."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _shape_of(tensor: Any) -> Any:
    return keras.KerasTensor(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))


def _tensor(leaf: Any) -> Any:
    return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _shown(result: Any) -> str:
    return str(keras.tree.map_structure(to_number, result))


def to_number(value: Any) -> Any:
    """A float for a number, as in Keras's logs; a list for an array."""
    array = np.asarray(value)
    if array.ndim:
        return array.tolist()
    item = array.item()
    return float(item) if isinstance(item, (bool, int, float)) else item


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
