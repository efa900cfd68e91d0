"""Which embedding layers of a model parameter servers can hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.compute.tensorflow.id_graph import Recording, id_function
from elasticcb.compute.tensorflow.lookups import Step, not_servable
from elasticcb.errors import describe
from elasticcb.layers.table_layers import TableLayer, answer, is_own, stop_answering, table_layers
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.batch_signatures import specs_of

logger = logging.getLogger(__name__)


def movable(
    model: keras.Model, step: Step, batch: Any, threshold_bytes: int, allowed: Callable[[int], bool]
) -> dict[int, TableSpec]:
    """The tables of a model: all `elasticcb.layers.Embedding`, and each `keras.layers.Embedding` that is large enough
    and whose results do not change when servers hold its rows.

    Args:
        model: built, and compiled for training.
        step: its training step, which takes a batch. It is traced, not run.
        batch: `(features, labels[, sample_weight])`.
        threshold_bytes: size from which a keras.layers.Embedding is one.
        allowed: whether one may be moved, by index in `model.weights`.

    Raises:
        NotServableError: an `elasticcb.layers.Embedding` is used in a way that needs all of its rows, or its ids can't
            be known before the step.
    """
    layers: dict[int, TableLayer] = {}
    for index, found in table_layers(model).items():
        if is_own(found[0]) or (
            len(found) == 1 and _bytes(found[0]) >= threshold_bytes and _is_plain(found[0]) and allowed(index)
        ):
            layers[index] = found[0]
    if not layers:
        return {}
    try:
        problems = _problems(model, step, batch, layers)
    except Exception as error:  # what is wrong with the step itself is told where it runs
        why = f"the step can't be traced, as it must be to know the ids beforehand: {describe(error)}"
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
    variable = layer._embeddings
    return int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size


def _is_plain(layer: Any) -> bool:
    variable = layer._embeddings
    return (
        layer.trainable
        and variable.trainable
        and variable.constraint is None
        and variable.regularizer is None
        and not layer.lora_enabled
        and layer.quantization_mode is None
        and "call" not in vars(layer)
    )


def _problems(model: keras.Model, step: Step, batch: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    specs = specs_of(batch)
    features = (batch[0],) if isinstance(batch, tuple) else (batch,)
    problems = _problems_of(model, step, specs, layers)
    # Evaluation may use a variable in other ways than training: a model that ranks all items multiplies with the table.
    for other, given in ((model.test_step, specs), (model.predict_step, specs_of(features))):
        try:
            problems = {**_problems_of(model, other, given, layers), **problems}
        except Exception as error:
            logger.debug("%s can't be traced: %s", other, describe(error))
    return problems


def _problems_of(model: keras.Model, step: Step, specs: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    recording: Recording

    def recorded(batch: Any) -> Recording:
        nonlocal recording
        recording = Recording(layers)
        step(batch)
        return recording

    def asked(index: int) -> Callable[[tf.Tensor], tf.Tensor]:
        return lambda ids: recording.lookup(index, ids)

    for index, layer in layers.items():
        answer(layer, asked(index))
    try:
        id_function(model, recorded, specs)
    finally:
        for layer in layers.values():
            stop_answering(layer)
    return recording.problems()
