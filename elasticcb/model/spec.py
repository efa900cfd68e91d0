"""What a job runs, as its processes see it: a model file (model_file.py), or what `fit` was given (program.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from elasticcb.settings import Mode

if TYPE_CHECKING:
    import keras

    from elasticcb.data.batches import BatchSource


class Spec(Protocol):
    """Brings the model, its optimizers, its metrics and callbacks, and the data if those are no files."""

    @property
    def path(self) -> Any:
        """Where the user finds it, for messages."""

    @property
    def loss_advice(self) -> str:
        """How the user gives the model a loss, as sentences."""

    @property
    def feed(self) -> Callable[..., Any] | None:
        """From raw records to examples; None where there is nothing to do."""

    @property
    def custom_data_reader(self) -> Callable[..., Any] | None:
        """Makes the reader; None for the formats that are known."""

    def batch_source(self, mode: Mode) -> BatchSource | None:
        """The batches of a mode; None where a reader's records are fed."""

    def build_model(self) -> keras.Model:
        """The model, compiled if it is to be trained."""

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """A new optimizer, the model's `optimizer`."""

    def make_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """New optimizers, all that the model has; `make_optimizer` needs no model for its one."""

    def make_eval_metrics(self) -> dict[str, Any]:
        """Metrics besides those of the model."""

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks of one process."""

    def require_trainable(self, model: keras.Model) -> None:
        """Raises `ModelFileError` unless `model` has an optimizer to train with."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the user; what it raises becomes a `ModelFileError`."""
