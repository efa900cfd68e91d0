"""The interface to the framework that computes: a few operations on batches and NumPy arrays.

A `Computation` trains a model as Keras does, and its weights are read afterwards. Only gradients of rows of embedding
tables leave a step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np

from elasticcb.compute.served_tables import ServedTables, not_servable
from elasticcb.errors import describe
from elasticcb.keras_private import embeddings_of, layers_of
from elasticcb.layers.table_layers import TableLayer, install, is_own, table_layers
from elasticcb.model.metric_messages import States
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.spec import Spec
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.variables import StepVariables
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_state import TableSpec


class MovingAverages:
    """The moving averages of a model's BatchNormalization layers.

    A layer called several times in a step updates its averages as often, which is only known from the step.
    """

    def __init__(self, model: keras.Model) -> None:
        indices = {id(variable): index for index, variable in enumerate(model.weights)}
        self._momentum: dict[int, float] = {}  # by index in `model.weights`
        self._calls: Counter[int] = Counter()
        self._thread: int | None = None  # the counting thread; another thread may trace the step to find its lookups
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
                for variable in (layer.moving_mean, layer.moving_variance):
                    if id(variable) in indices:
                        self._watch(variable, indices[id(variable)], float(layer.momentum))

    def _watch(self, variable: Any, index: int, momentum: float) -> None:
        self._momentum[index] = momentum
        assign = type(variable).assign

        def counting(value: Any) -> Any:
            if self._thread == threading.get_ident():
                self._calls[index] += 1
            return assign(variable, value)

        variable.assign = counting

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts updates of a step that is traced or run inside the context."""
        self._calls.clear()
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    @property
    def decays(self) -> dict[int, float]:
        """By index in `model.weights`: how much of its old value each variable keeps after the last counted step."""
        return {
            index: momentum ** self._calls[index] for index, momentum in self._momentum.items() if self._calls[index]
        }


logger = logging.getLogger(__name__)

Step = Callable[[Any], Any]
# Whether a layer may be moved, by the index of its variable in `model.weights`, and its size in bytes.
Allowed = Callable[[int, int], bool]
# From a model, its step, a batch and layers by variable: why rows can't be determined before the step, by variable.
FindProblems = Callable[[keras.Model, Step, Any, Mapping[int, TableLayer]], dict[int, str]]


def movable(
    model: keras.Model,
    steps: Iterable[tuple[Step, Any]],
    allowed: Allowed,
    problems_of: FindProblems,
) -> dict[int, TableSpec]:
    """The tables of a model: all `elasticcb.layers.Embedding`, and each `keras.layers.Embedding` that is allowed and
    gives the same results with its rows on servers.

    Args:
        steps: those of the job, each with a batch. Evaluation may use a variable differently than training: a ranking
            model multiplies with the whole table.

    Raises:
        NotServableError: an `elasticcb.layers.Embedding` is used in a way that needs all its rows, or its ids can't be
            determined before the step.
    """
    layers: dict[int, TableLayer] = {}
    for index, found in table_layers(model).items():
        if is_own(found[0]) or (len(found) == 1 and _is_plain(found[0]) and allowed(index, _bytes(found[0]))):
            layers[index] = found[0]
    if not layers:
        return {}
    problems: dict[int, str] = {}
    try:
        for step, batch in steps:
            problems = problems_of(model, step, batch, layers) | problems
    except Exception as error:  # errors of the step itself are reported where it runs
        why = f"the step can't be traced, which is needed to determine the ids beforehand: {describe(error)}"
        problems = dict.fromkeys(layers, why)
    tables = {}
    for index, layer in layers.items():
        if is_own(layer):
            if index in problems:
                raise not_servable(layer, problems[index])
            tables[index] = layer.table_spec()
        elif index in problems:
            logger.info("%r stays a dense variable: %s", layer.path, problems[index])
        else:
            tables[index] = TableSpec(layer.input_dim)
    return tables


def _bytes(layer: TableLayer) -> int:
    variable = embeddings_of(layer)
    return int(np.prod(variable.shape)) * dtype_of(variable.dtype).itemsize


def _is_plain(layer: Any) -> bool:
    variable = embeddings_of(layer)
    return (
        layer.trainable
        and variable.trainable
        and variable.constraint is None
        and variable.regularizer is None
        and not layer.lora_enabled
        and layer.quantization_mode is None
        and "call" not in vars(layer)
    )


TableRows = Mapping[int, Array]  # by embedding table: [n, dim]
RowGradients = dict[int, tuple[Array, Array]]  # by variable: unique int64 ids [n], gradients of these rows [n, …]


@dataclass(frozen=True)
class Prepared:
    """A batch that is ready for a step of its mode.

    Attributes:
        data: the batch in the backend's form.
        records: number of records.
        ids: by embedding table, the unique ids (int64 [n]) whose rows the step needs.
        places: backend-specific: the positions of the rows in the step.
    """

    data: Any
    records: int
    ids: Mapping[int, Array] = field(default_factory=dict)
    places: Any = field(default_factory=dict)


@dataclass
class StepResult:
    """The result of a training step.

    Attributes:
        logs: logs of this batch, as Python numbers.
        states: metric states of this batch only.
        rows: by embedding table, gradients of the rows of the batch.
        shared: `OptimizerState.shared` before the step, for a model with tables.
    """

    logs: dict[str, Any]
    states: States
    rows: RowGradients
    shared: Mapping[str, Array] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The loss in the logs; of an array, the mean; 0 without one."""
        loss = self.logs.get("loss", 0.0)
        return float(np.mean(loss)) if isinstance(loss, list) else float(loss)


class LocalModel(ABC):
    """A model that is trained in this process by its own optimizers, except the rows of embedding tables."""

    @property
    @abstractmethod
    def decays(self) -> Mapping[int, float]:
        """Of moving averages, by variable: the weight of the old value in the value after a batch."""

    @abstractmethod
    def weights(self) -> Sequence[Array]:
        """The model's current weights, without a copy where possible: valid until the next step."""

    @abstractmethod
    def set_weights(self, weights: PlacedBlocks) -> None:
        """Sets the model to `weights`; its variables are Keras variables, readable by anyone."""

    @abstractmethod
    def optimizer_state(self) -> OptimizerState:
        """The optimizer state, except that of embedding tables."""

    @abstractmethod
    def shared_optimizer_state(self) -> Mapping[str, Array]:
        """The optimizer state that belongs to no variable: `OptimizerState.shared`."""

    @abstractmethod
    def set_optimizer_state(self, state: OptimizerState) -> None:
        """Sets the optimizer state; missing parts stay unchanged, and so does the learning rate."""


class Computation(LocalModel):
    """The steps of one model. Only `prepare` may be called by several threads."""

    _model: keras.Model
    _served: ServedTables  # its embedding tables
    _averages: MovingAverages

    @abstractmethod
    def prepare(self, data: Any, mode: Mode, fixed: Sequence[bool] = ()) -> Prepared:
        """Prepares a batch of the input pipeline for a step. May be called in another thread, during a step.

        Args:
            data: the batch as Keras passes it to the model's step, for `keras.utils.unpack_x_y_sample_weight`.
            fixed: as in `Pipeline`; a step that is traced before it runs sees these sizes as numbers, as in Keras.

        Raises:
            ModelFileError: its ids can't be determined, or are out of range.
        """

    @abstractmethod
    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        """Trains the model on a batch, like Keras.

        Args:
            rows: rows of the embedding tables, for the ids of the batch. Only their gradients are returned.
        """

    @abstractmethod
    def evaluate(self, batch: Prepared, rows: TableRows) -> tuple[dict[str, Any], Any]:
        """Adds a batch to the metrics, with the current weights.

        Returns:
            Current logs, and `(labels, predictions[, weight])` if a metric needs them on the master; else `()`.
        """

    @abstractmethod
    def predict(self, batch: Prepared, rows: TableRows) -> Any:
        """The result of the model's `predict_step` for a batch: a structure of NumPy arrays."""

    @property
    def decays(self) -> Mapping[int, float]:
        return self._averages.decays

    def hold_tables(self, tables: Iterable[tuple[int, Array, Array]]) -> None:
        """Loads all rows of the embedding tables into the model; no more steps follow.

        Args:
            tables: (variable, ids [n], rows [n, dim]). The arrays do not change afterwards.
        """
        self._served.release()
        for index, ids, rows in tables:
            install(self._model, index, ids, rows)


class HeldModel(NamedTuple):
    """A model whose weights are on servers.

    Attributes:
        model: built; compiled if it is to be trained.
        metrics: metrics of the model.
        specs: specs of `model.weights`, as sent by the master.
        trains: whether it is trained here; otherwise its optimizers are not built.
    """

    model: keras.Model
    metrics: ModelMetrics
    specs: Sequence[VariableSpec]
    trains: bool = True

    @property
    def tables(self) -> list[int]:
        """The indices of the embedding tables in `model.weights`."""
        return [index for index, spec in enumerate(self.specs) if spec.table]


def model_step(model: keras.Model, mode: Mode) -> Step:
    """The model's own step."""
    names = {Mode.TRAINING: "train_step", Mode.EVALUATION: "test_step", Mode.PREDICTION: "predict_step"}
    step: Step = getattr(model, names[mode])
    return step


class Backend(ABC):
    """A framework.

    Attributes:
        forks_with_gpus: whether a process may import it, and then fork processes that use GPUs.
        problems_of: why rows can't be determined before a step, as for `movable`.
    """

    forks_with_gpus = True
    problems_of: FindProblems

    @abstractmethod
    def build(
        self, spec: Spec, model: keras.Model, batch: Any, mode: Mode, fixed: Sequence[bool] = ()
    ) -> StepVariables | None:
        """Builds what Keras builds lazily (weights of a subclass model, metrics), with one real batch.

        Afterwards, metrics include that batch: reset them.

        Args:
            model: the model of `spec`, compiled unless `mode` is `PREDICTION`.
            batch: a batch of the input pipeline.
            fixed: as in `prepare`.

        Returns:
            In training, for a model with its own step: what the step gives to optimizers.

        Raises:
            ModelFileError: the model, its loss or its metrics do not accept the batch.
        """

    @abstractmethod
    def outputs(self, model: keras.Model, batch: Any) -> Any:
        """The current result of `predict_step` of a built model for a batch of the input pipeline."""

    def data(self, model: keras.Model, batch: Any) -> Any:
        """A batch of the input pipeline in the form in which the model's steps get it."""
        return batch

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        allowed: Allowed,
        validation: Callable[[], Any] | None = None,
    ) -> dict[int, TableSpec]:
        """The embedding tables of a model, by index in `model.weights`: all `elasticcb.layers.Embedding`, and each
        `keras.layers.Embedding` that is allowed and gives the same results with its rows on servers.

        Args:
            model, batch, mode: as in `build`, which must be called before.
            allowed: whether a keras.layers.Embedding may become a table.
            validation: in training, a batch of the validation data, if there is any.

        Raises:
            NotServableError: an `elasticcb.layers.Embedding` is used in a way that needs all its rows, or its ids can't
                be determined before the step.
        """
        data = self.data(model, batch)

        def steps() -> Iterator[tuple[Step, Any]]:
            yield step_of(mode), data
            if validation is not None:
                yield step_of(Mode.EVALUATION), self.data(model, validation())

        with self._steps(model, mode) as step_of:
            return movable(model, steps(), allowed, self.problems_of)

    def _steps(self, model: keras.Model, mode: Mode) -> AbstractContextManager[Callable[[Mode], Step]]:
        """Context with the steps to trace in a job of this mode."""
        return contextlib.nullcontext(functools.partial(model_step, model))

    @abstractmethod
    def computation(self, held: HeldModel) -> Computation:
        """The steps of a model, whose variables hold the servers' weights. The rows of its embedding tables are
        provided for each step from now on.

        Raises:
            ModelFileError: the model can't be trained.
        """
