"""Which embedding layers of a model parameter servers can hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from elasticcb.compute.served_tables import not_servable
from elasticcb.errors import describe
from elasticcb.keras_private import embeddings_of
from elasticcb.layers.table_layers import TableLayer, is_own, table_layers
from elasticcb.rpc.tensors import dtype_of
from elasticcb.sharding.table_spec import TableSpec

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
