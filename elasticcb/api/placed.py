"""The model passed to `Cluster.place`, in the caller's process."""

from __future__ import annotations

import keras

from elasticcb.errors import UsageError
from elasticcb.keras_private import layers_of, trained_by
from elasticcb.layers import Embedding
from elasticcb.master.initial_model import InitialModel
from elasticcb.model.program import Program
from elasticcb.model.weights import variable_specs
from elasticcb.optimizers.held_state import read_optimizers, write_optimizers
from elasticcb.optimizers.state import ModelState
from elasticcb.optimizers.traits import learning_rate_variable, may_split, model_optimizers, steps_made, unwrapped
from elasticcb.optimizers.variables import StepVariables, described


class PlacedWeights:
    """Provides the servers' initial state, and takes back their final state.

    Args:
        model: a built model with an optimizer.

    Raises:
        UsageError: the model is not built or has no optimizer; one of several optimizers is not built; or it has
            ElasticCB's own embedding layers.
    """

    def __init__(self, model: keras.Model) -> None:
        if not isinstance(model, keras.Model):
            raise UsageError(f"`place` takes a keras.Model. Received: {model!r} (of type {type(model).__name__})")
        optimizers = model_optimizers(model)
        if not model.built or not optimizers:
            missing = "has no optimizer: call compile()" if model.built else "is not built: call the model on a batch"
            raise UsageError(f"The model {model.name!r} {missing} before `place`.")
        own = next((layer for layer in layers_of(model) if isinstance(layer, Embedding)), None)
        if own is not None:
            raise UsageError(
                f"The layer {own.name!r} is an elasticcb.layers.Embedding, whose rows `place` does not support: a "
                "custom loop looks up ids only when it runs. Use keras.layers.Embedding here, or train with "
                "`Cluster.fit`, which accepts a model with its own train_step."
            )
        owners = _owners(model)
        self.model = model
        self.variables = variable_specs(model, None if owners is None else StepVariables(owners, owners))
        self.may_split = all(map(may_split, optimizers))
        self.optimizers = described(optimizers, self.variables, model.weights)

    def start(self) -> InitialModel:
        """The present state of the model."""
        optimizers = model_optimizers(self.model)
        version = steps_made(optimizers)
        state = read_optimizers(optimizers, self.model.weights, self.variables) if version else None
        weights = [variable.numpy() for variable in self.model.weights]
        return InitialModel(weights, optimizer_state=state, version=version)

    def program(self) -> bytes:
        """The serialized model for workers and servers."""
        return Program(self.model, {}).dumps()[0]

    @property
    def learning_rate(self) -> float | None:
        """The current learning rate; None if it can't be set."""
        rate = learning_rate_variable(getattr(self.model, "optimizer", None))
        return None if rate is None else float(rate)

    def set_state(self, state: ModelState) -> None:
        """Copies the servers' state to the model and its optimizers."""
        rate = self.learning_rate  # the caller's value; it may be newer than the servers' value
        for variable, value in zip(self.model.weights, state.weights, strict=True):
            variable.assign(value)
        write_optimizers(state.optimizer, model_optimizers(self.model), self.model.weights, self.variables)
        if rate is not None:
            self.model.optimizer.learning_rate = rate


def _owners(model: keras.Model) -> dict[int, int] | None:
    """For each weight, the index of the optimizer that trains it; None: one optimizer trains all."""
    optimizers = model_optimizers(model)
    if len(optimizers) == 1:
        return None
    indices = {id(variable): index for index, variable in enumerate(model.weights)}
    owners: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers):
        if optimizer.built:
            owners |= {indices[id(variable)]: place for variable in trained_by(unwrapped(optimizer))}
    missing = [v.path for i, v in enumerate(model.weights) if v.trainable and i not in owners]
    if missing:
        raise UsageError(
            f"The model {model.name!r} has {len(optimizers)} optimizers, but none of them trains {missing[0]!r}. "
            "Before `place`, call optimizer.build(variables) on each with the variables that it trains."
        )
    return owners
