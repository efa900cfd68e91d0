"""A Keras model as a list of weights, the same in every process of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping

import keras

from elasticcb.optimizers.traits import decays, model_optimizers
from elasticcb.optimizers.variables import leaves
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_spec import TableSpec


def variable_specs(
    model: keras.Model, updated: Mapping[int, int] | None = None, tables: Mapping[int, TableSpec] | None = None
) -> list[VariableSpec]:
    """The weights that the servers hold, in the order of `model.weights`.

    What Keras does not count among them stays on the worker that runs the batches: the state of a stateful RNN, which
    goes on there from batch to batch as in `fit`, in whatever tasks the batches are, and the seeds of Dropout.

    Args:
        updated: what `Backend.build` gave. With it, variables that no optimizer updates count as non-trainable,
            whatever Keras calls them: what the step assigns to them (a target network) is so not lost.
        tables: the embedding tables among them, by index.
    """
    tables = tables or {}
    trainable = {id(variable) for variable in model.trainable_weights}
    undecayed = _undecayed(model, updated)
    return [
        VariableSpec(
            path=variable.path,
            shape=(tables[index].input_dim or 0, *variable.shape[1:]) if index in tables else tuple(variable.shape),
            dtype=keras.backend.standardize_dtype(variable.dtype),
            trainable=id(variable) in trainable if updated is None else index in updated,
            constraint=_constraint(variable),
            optimizer=(updated or {}).get(index, 0),
            no_weight_decay=index in undecayed,
            table=tables[index].to_json() if index in tables else "",
        )
        for index, variable in enumerate(model.weights)
    ]


def _undecayed(model: keras.Model, updated: Mapping[int, int] | None) -> set[int]:
    """Variables that the model's optimizers were told to leave out of weight decay, as objects or by name."""
    trainable = {i: variable for i, variable in enumerate(model.weights) if variable.trainable}
    return {
        index
        for place, optimizer in enumerate(model_optimizers(model))
        for leaf in leaves(optimizer, place, {i: v for i, v in trainable.items() if (updated or {}).get(i, 0) == place})
        for index, variable in leaf.variables.items()
        if not decays(leaf.optimizer, variable)
    }


def _constraint(variable: keras.Variable) -> str:
    if variable.constraint is None:
        return ""
    return json.dumps(keras.saving.serialize_keras_object(variable.constraint))
