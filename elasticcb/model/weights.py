"""A Keras model as a list of weights, the same in every process of a job."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elasticcb.keras_private import decays
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.optimizers.variables import StepVariables, leaves
from elasticcb.sharding.flat_blocks import PlacedBlocks, unpack_weights
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_state import TableSpec


def variable_specs(
    model: keras.Model, step: StepVariables | None = None, tables: Mapping[int, TableSpec] | None = None
) -> list[VariableSpec]:
    """The weights that the servers store, in the order of `model.weights`.

    Variables that Keras does not count among them stay on the worker that runs the batches: the seeds of Dropout, and
    the state of a stateful RNN, which continues there from batch to batch as in `fit`, across tasks.

    Args:
        step: result of `Backend.build`. If given, variables that no optimizer updates count as non-trainable,
            whatever Keras calls them, so that assignments of the step to them (a target network) are not lost.
        tables: the embedding tables among them, by index.
    """
    tables = tables or {}
    if step is None:
        trainable = {id(variable) for variable in model.trainable_weights}
        own = {index: 0 for index, variable in enumerate(model.weights) if id(variable) in trainable}
        step = StepVariables(own, own)
    undecayed = _undecayed(model, step.updated)
    return [
        VariableSpec(
            path=variable.path,
            shape=(tables[index].input_dim or 0, *variable.shape[1:]) if index in tables else tuple(variable.shape),
            dtype=keras.backend.standardize_dtype(variable.dtype),
            trainable=index in step.updated,
            constraint=_constraint(variable),
            optimizer=step.given.get(index, -1),
            no_weight_decay=index in undecayed,
            aggregation="" if index in step.updated else _aggregation(variable),
            table=tables[index].to_json() if index in tables else "",
        )
        for index, variable in enumerate(model.weights)
    ]


def assign_dense(model: keras.Model, specs: Sequence[VariableSpec], blocks: PlacedBlocks) -> None:
    """Sets the model to the servers' weights, except embedding tables."""
    values = unpack_weights(blocks, specs, blocks.partition)
    for variable, spec, value in zip(model.weights, specs, values, strict=True):
        if not spec.table:
            variable.assign(np.array(value))  # a copy: frameworks may use the memory of what they are given


def _undecayed(model: keras.Model, updated: Mapping[int, int]) -> set[int]:
    """Variables that the model's optimizers exclude from weight decay, as objects or by name."""
    return {
        index
        for place, optimizer in enumerate(model_optimizers(model))
        for leaf in leaves(optimizer, place, {i: model.weights[i] for i, own in updated.items() if own == place})
        for index, variable in leaf.variables.items()
        if not decays(leaf.optimizer, variable)
    }


def _aggregation(variable: keras.Variable) -> str:
    """How changes by several workers count. Without a declaration, integers are counters."""
    declared: str = variable.aggregation
    if declared != "none":
        return declared
    return "count" if "int" in keras.backend.standardize_dtype(variable.dtype) else ""


def _constraint(variable: keras.Variable) -> str:
    if variable.constraint is None:
        return ""
    try:
        return json.dumps(keras.saving.serialize_keras_object(variable.constraint))
    except Exception:  # it has no config: in a program, servers have the object
        name = constraint_name(variable.constraint)
        return json.dumps({"module": None, "class_name": name, "config": {}, "registered_name": name})


def constraint_name(constraint: Any) -> str:
    """The name by which Keras looks for a constraint that is not its own."""
    if isinstance(constraint, types.FunctionType):
        return str(constraint.__name__)
    return str(keras.saving.get_registered_name(type(constraint)))
