"""How a step uses the variables of embedding layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.movable import Step
from elasticcb.compute.tensorflow.id_graph import Recording, id_function
from elasticcb.layers.table_layers import TableLayer, answer, stop_answering
from elasticcb.tf.batch_signatures import specs_of


def problems_of(model: keras.Model, step: Step, batch: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    """Why rows can't be known before a step of `batch`, which is traced, by variable; as `FindProblems`."""
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
        id_function(model, recorded, specs_of(batch))
    finally:
        for layer in layers.values():
            stop_answering(layer)
    return recording.problems()
