"""The model that `Cluster.place` was given, in the process of its caller."""

from __future__ import annotations

import keras

from elasticcb.compute.registry import backend
from elasticcb.errors import UsageError
from elasticcb.layers import Embedding
from elasticcb.master.initial_model import InitialModel
from elasticcb.model.program import Program
from elasticcb.model.weights import variable_specs
from elasticcb.optimizers.state import ModelState, read_optimizers, write_optimizers
from elasticcb.optimizers.traits import learning_rate_variable, may_split, model_optimizers, steps_made, unwrapped


class PlacedWeights:
    """What the servers begin with, and what becomes of what they end with.

    Args:
        model: built, and with an optimizer.

    Raises:
        UsageError: it is not, or one optimizer of several does not know what it trains; or it has embedding layers
            of ElasticCB's own; or the backend has it not.
    """

    def __init__(self, model: keras.Model) -> None:
        if not isinstance(model, keras.Model):
            raise UsageError(f"`place` takes a keras.Model. Received: {model!r} (of type {type(model).__name__})")
        if backend().not_placed:
            raise UsageError(backend().not_placed)
        optimizers = model_optimizers(model)
        if not model.built or not optimizers:
            missing = "has no optimizer: call its compile()" if model.built else "is not built: call it on a batch"
            raise UsageError(f"The model {model.name!r} {missing} before `place`.")
        own = next((layer for layer in model._flatten_layers() if isinstance(layer, Embedding)), None)
        if own is not None:
            raise UsageError(
                f"The layer {own.name!r} is an elasticcb.layers.Embedding, whose rows `place` can't hold: a loop of "
                "your own asks for ids when it runs. Use keras.layers.Embedding here, or train with `Cluster.fit`, "
                "which takes a train_step of the model's own."
            )
        self.model = model
        self.variables = variable_specs(model, _owners(model))
        self.may_split = all(map(may_split, optimizers))
        self._owner_indices = [spec.optimizer for spec in self.variables]

    def start(self) -> InitialModel:
        """The present state of the model."""
        optimizers = model_optimizers(self.model)
        version = steps_made(optimizers)
        state = read_optimizers(optimizers, self.model.weights, self._owner_indices) if version else None
        weights = [variable.numpy() for variable in self.model.weights]
        return InitialModel(weights, optimizer_state=state, version=version)

    def program(self) -> bytes:
        """The model as it travels to workers and servers."""
        return Program(self.model, {}).dumps()

    @property
    def learning_rate(self) -> float | None:
        """The present one; None where it can't be set."""
        rate = learning_rate_variable(getattr(self.model, "optimizer", None))
        return None if rate is None else float(rate)

    def set_state(self, state: ModelState) -> None:
        """Makes the model and its optimizers hold what the servers hold."""
        rate = self.learning_rate  # the caller's; it may be newer than that of the servers
        for variable, value in zip(self.model.weights, state.weights, strict=True):
            variable.assign(value)
        write_optimizers(state.optimizer, model_optimizers(self.model), self.model.weights, self._owner_indices)
        if rate is not None:
            self.model.optimizer.learning_rate = rate


def _owners(model: keras.Model) -> dict[int, int] | None:
    """By index of a weight, the index of the optimizer that trains it; None: there is one, for all of them."""
    optimizers = model_optimizers(model)
    if len(optimizers) == 1:
        return None
    indices = {id(variable): index for index, variable in enumerate(model.weights)}
    owners: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers):
        if optimizer.built:
            owners |= {indices[id(variable)]: place for variable in unwrapped(optimizer)._trainable_variables}
    missing = [v.path for i, v in enumerate(model.weights) if v.trainable and i not in owners]
    if missing:
        raise UsageError(
            f"The model {model.name!r} has {len(optimizers)} optimizers, and none that trains {missing[0]!r}. Tell "
            "each before `place` what it trains: optimizer.build(variables)."
        )
    return owners
