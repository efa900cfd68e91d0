"""What is asked of the framework that computes: a few operations, on batches and NumPy arrays.

Servers that apply gradients ask for a `GradientComputation`, whose optimizers apply nothing: they hand gradients over.
What is set by other means, as moving averages, comes out of a step as it is after it. With local updates a
`LocalComputation` trains as Keras does, and tells where it has come to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from elasticcb.model.metric_messages import States
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.spec import Spec
from elasticcb.optimizers.state import OptimizerState
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.sharding.table_spec import TableSpec

TableRows = Mapping[int, Array]  # by embedding table: [n, dim]
RowGradients = dict[int, tuple[Array, Array]]  # by variable: unique int64 ids [n], gradients of these rows [n, …]


@dataclass(frozen=True)
class Prepared:
    """A batch that is ready for a step of its mode.

    Attributes:
        data: as the backend takes it.
        records: how many it holds.
        ids: by embedding table, the unique ids (int64 [n]) whose rows the step needs.
        places: the backend's own: where in the step the rows go.
    """

    data: Any
    records: int
    ids: Mapping[int, Array] = field(default_factory=dict)
    places: Any = field(default_factory=dict)


@dataclass
class StepResult:
    """What a training step came to.

    Attributes:
        logs: the batch's own, as Python numbers.
        states: of the metrics, over this batch alone.
        rows: gradients of some rows of a variable.
        shared: `OptimizerState.shared` as it was before the step, of local training where there are such gradients.
    """

    logs: dict[str, Any]
    states: States
    rows: RowGradients
    shared: Mapping[str, Array] = field(default_factory=dict, kw_only=True)


@dataclass
class GradientResult(StepResult):
    """One whose gradients go to the servers. Flat arrays are in the order of `sharding.partition.layout`.

    Attributes:
        gradients: by server and dtype, those of `dense_variables`, flat; of the plain loss, clipped, and of the wire's
            dtype.
        dense_variables: indices of variables, in the order of the model.
        state: by server and dtype, the variables that no optimizer updates, after the step, flat.
        decays: of moving averages, by variable: how much of its old value the step's new one is made of.
        overflow: why the gradients can't be used: those of the scaled loss are not finite; "" where they can.
    """

    gradients: list[dict[str, Array]]
    dense_variables: tuple[int, ...]
    state: list[dict[str, Array]]
    decays: Mapping[int, float]
    overflow: str = ""


class Computation(ABC):
    """The steps of one model. All but `prepare` is called by one thread."""

    @abstractmethod
    def prepare(self, data: Any, mode: Mode) -> Prepared:
        """A batch of the input pipeline, ready for a step. May be called in another thread, during a step.

        Args:
            data: as the model's step gets it from Keras; `keras.utils.unpack_x_y_sample_weight` takes it apart.

        Raises:
            ModelFileError: the ids that it looks up can't be known, or are out of range.
        """

    @abstractmethod
    def evaluate(self, batch: Prepared, rows: TableRows) -> tuple[dict[str, Any], Any]:
        """Adds a batch to the metrics, at the weights that were set last.

        Returns:
            Present logs, and `(labels, predictions[, weight])` if a metric needs them to travel; else `()`.
        """

    @abstractmethod
    def predict(self, batch: Prepared, rows: TableRows) -> Any:
        """What the model's `predict_step` gives for a batch: a structure of NumPy arrays."""

    @abstractmethod
    def set_weights(self, weights: PlacedBlocks) -> None:
        """Makes the model hold `weights`; its variables are Keras's, which anybody can read."""

    @abstractmethod
    def hold_tables(self, tables: Iterable[tuple[int, Array, Array]]) -> None:
        """Makes the model one that holds all rows of its embedding tables; no further step comes.

        Args:
            tables: (variable, ids [n], rows [n, dim]). The arrays are not changed afterwards.
        """


class GradientComputation(Computation):
    """A model whose gradients go to servers, which apply them."""

    @abstractmethod
    def train(self, batch: Prepared, weights: PlacedBlocks, version: int, rows: TableRows) -> GradientResult:
        """Gradients of a batch at `weights`, which become the model's.

        Args:
            version: of the weights; the `iterations` of the optimizers.
            rows: of the embedding tables, by the ids of the batch.
        """


class LocalComputation(Computation):
    """A model that its own optimizers train, but for the rows of embedding tables."""

    @abstractmethod
    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        """Trains the model on a batch, as Keras does.

        Args:
            rows: of the embedding tables, by the ids of the batch. Their gradients alone are handed over.
        """

    @property
    @abstractmethod
    def decays(self) -> Mapping[int, float]:
        """Of moving averages, by variable: how much of its old value that after a batch is made of."""

    @abstractmethod
    def weights(self, partition: Sequence[Sequence[Slice]]) -> PlacedBlocks:
        """The model's present weights, cut for servers."""

    @abstractmethod
    def optimizer_state(self) -> OptimizerState:
        """What the optimizers hold of all but embedding tables."""

    @abstractmethod
    def shared_optimizer_state(self) -> Mapping[str, Array]:
        """What they hold of no variable: `OptimizerState.shared`."""

    @abstractmethod
    def set_optimizer_state(self, state: OptimizerState) -> None:
        """Makes the optimizers hold `state`; what it lacks stays as it is, and so does a learning rate."""


class PlacedComputation(ABC):
    """A model whose optimizers exchange with the servers whenever they are applied, in any code."""

    @abstractmethod
    def set_weights(self, weights: Sequence[Array]) -> None:
        """Makes the model hold these, in the order of `model.weights`."""


@dataclass(frozen=True)
class Applied:
    """What an optimizer of a `PlacedComputation` was given.

    Attributes:
        gradients: dense ones, by variable; of the plain loss, clipped.
        rows: gradients of some rows of a variable.
        state: the variables that no optimizer updates, as they are now, by index.
        usable: whether gradients are finite, as far as the loss scale can tell.
    """

    gradients: dict[int, Array]
    rows: RowGradients
    state: dict[int, Array]
    usable: bool


Exchange = Callable[[Applied], Sequence[Array]]  # all weights after an update, in the order of `model.weights`


class HeldModel(NamedTuple):
    """A model whose weights servers hold.

    Attributes:
        model: built; compiled if it is to be trained.
        metrics: of the model.
        specs: of `model.weights`, as the master gives them.
        partition: by server, the slices of `model.weights` that it holds at first.
    """

    model: keras.Model
    metrics: ModelMetrics
    specs: Sequence[VariableSpec]
    partition: Sequence[Sequence[Slice]]


class Backend(ABC):
    """A framework.

    Attributes:
        not_placed: why it has no `placed`, and what to do; "" where it has.
        forks_with_gpus: whether a process may import it, and what that forks use GPUs.
    """

    not_placed = ""
    forks_with_gpus = True

    @abstractmethod
    def build(
        self, spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool = False
    ) -> dict[int, int] | None:
        """Builds what Keras builds lazily (weights of a subclass model, metrics), with one real batch.

        Metrics then hold that batch: reset them.

        Args:
            model: of `spec`, compiled unless `mode` is `PREDICTION`.
            batch: of the input pipeline.
            local: in training, workers apply gradients themselves, so that their steps may do what Keras does.

        Returns:
            In training, for a model whose step is its own or that has several optimizers: the index of the optimizer
            that updates a variable, by index in `model.weights`.

        Raises:
            ModelFileError: the model, its loss or its metrics can't take the batch.
        """

    @abstractmethod
    def outputs(self, model: keras.Model, batch: Any) -> Any:
        """What the `predict_step` of a built model gives for a batch of the input pipeline, as it is now."""

    @abstractmethod
    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        threshold_bytes: int,
        allowed: Callable[[int], bool],
        local: bool = False,
    ) -> dict[int, TableSpec]:
        """The embedding tables of a model, by index in `model.weights`: all `elasticcb.layers.Embedding`, and each
        `keras.layers.Embedding` that is large enough and whose results do not change when servers hold its rows.

        Args:
            model, batch, mode, local: as in `build`, which comes before.
            threshold_bytes: size from which a keras.layers.Embedding is one.
            allowed: whether one may be moved.

        Raises:
            NotServableError: an `elasticcb.layers.Embedding` is used in a way that needs all of its rows, or its ids
                can't be known before the step.
        """

    @abstractmethod
    def computation(self, held: HeldModel) -> GradientComputation:
        """The steps of a model. Rows of its embedding tables come from elsewhere from now on.

        Raises:
            ModelFileError: the model can't be trained on so many servers.
        """

    @abstractmethod
    def local_computation(self, held: HeldModel) -> LocalComputation:
        """The steps of a model that trains here. Raises as `computation`."""

    @abstractmethod
    def placed(
        self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange
    ) -> PlacedComputation:
        """Lets `exchange` do what the optimizers of a built model did. Raises as `computation`."""
