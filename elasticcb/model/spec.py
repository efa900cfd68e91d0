"""The interface of a job's definition: a model file (model_file.py) or a serialized job of `fit` (program.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticcb.settings import Mode

if TYPE_CHECKING:
    import keras

    from elasticcb.data.batches import BatchSource


@dataclass(frozen=True)
class Words:
    """How messages name the parts of a job, for the author of a model file or of a program that calls `Cluster.fit`."""

    model: str
    data: str
    definition: str


def input_names(model: keras.Model) -> tuple[str, ...] | None:
    """The names of the inputs of a functional model with Keras's own steps; None: unknown."""
    if not type(model).__module__.startswith("keras."):
        return None
    try:
        given = model.input
    except (AttributeError, ValueError):  # it is not built
        return None
    named = given if isinstance(given, dict) else {getattr(each, "name", ""): each for each in _listed(given)}
    return tuple(named) if all(hasattr(each, "name") for each in named.values()) else None


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, (list, tuple)) else [given]


class Spec(ABC):
    """Provides the model, its optimizers, metrics and callbacks, and the data unless it comes from files."""

    path: Any  # where it is defined, for messages
    loss_advice: str  # how to add a loss to the model
    is_built = False  # whether its model needs no first batch, because it is a copy of a built one

    @property
    def words(self) -> Words:
        return Words("The model", "The data", "The program")

    @property
    @abstractmethod
    def inputs(self) -> Sequence[str] | None:
        """`input_names` of the model that was built last."""

    @property
    def variables(self) -> Mapping[int, Any]:
        """Variables besides the weights that processes of the job share, by number (callbacks/shared_state.py)."""
        return {}

    @property
    def followed(self) -> Mapping[int, Any]:
        """Objects whose attributes hooks in another process may set, by number (callbacks/shared_attributes.py)."""
        return {}

    def follow(self) -> None:  # noqa: B027 nothing is followed
        """Some of these were changed here."""

    @property
    def rehearsal(self) -> Any:
        """What a worker is to compute before it trains (compute/first_batch.py); None: nothing."""
        return None

    @property
    def is_steady(self) -> bool:
        """Whether a later job with the same definition can use its model again, because only variables of it change."""
        return False

    @property
    def feed(self) -> Callable[..., Any] | None:
        """Converts a dataset of raw records; None if not needed."""
        return None

    @property
    def feed_batch(self) -> Callable[..., Any] | None:
        """Converts the raw records of a batch; None if not needed."""
        return None

    @property
    def custom_data_reader(self) -> Callable[..., Any] | None:
        """Creates a custom reader; None for built-in formats."""
        return None

    def batch_source(self, mode: Mode) -> BatchSource | None:
        """The batches of a mode; None if the data comes from a reader."""
        return None

    @abstractmethod
    def build_model(self) -> keras.Model:
        """The model, compiled if it will be trained."""

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """A new optimizer, the model's `optimizer`."""
        return self.make_optimizers()[0]

    @abstractmethod
    def make_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """New instances of all optimizers of the model; `make_optimizer` creates a single one without the model."""

    def make_eval_metrics(self) -> dict[str, Any]:
        """Metrics in addition to the model's."""
        return {}

    @abstractmethod
    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks of one process."""

    def use_own_seeds(self, index: int) -> None:  # noqa: B027 a process may have seeds of its own
        """Makes random layers of the worker with this index draw other numbers than those of other workers."""

    def require_trainable(self, model: keras.Model) -> None:  # noqa: B027 the caller of `fit` has checked it
        """Raises `ModelFileError` if `model` has no optimizer."""

    @abstractmethod
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the user; its errors become `ModelFileError`s."""
