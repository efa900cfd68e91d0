"""How a step uses the variables of embedding layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.movable import Step
from elasticcb.compute.tensorflow.id_graph import Recording, id_function
from elasticcb.layers.table_layers import TableLayer, answered
from elasticcb.tf.batch_signatures import specs_of


def problems_of(model: keras.Model, step: Step, batch: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    """Why rows can't be determined before a step of `batch`, which is traced, by variable; see `FindProblems`."""
    recording: Recording

    def recorded(batch: Any) -> Recording:
        nonlocal recording
        recording = Recording(layers)
        step(batch)
        return recording

    with answered(layers, lambda index, ids: recording.lookup(index, ids)):
        id_function(model, recorded, specs_of(batch, [True] * len(tf.nest.flatten(batch))))
    return recording.problems()
