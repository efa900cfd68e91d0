"""What `predict` gives back, in the shape that Keras gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.data.batches import BatchSource


def whole_predictions(model: keras.Model, source: BatchSource, parts: Mapping[int, Mapping[str, np.ndarray]]) -> Any:
    """The outputs of all tasks as one, in the structure of the model's outputs.

    Args:
        parts: by the first batch of a task, its outputs by their path in that structure.
    """
    ordered = [parts[start] for start in sorted(parts)]
    arrays = [np.concatenate([part[path] for part in ordered]) for path in ordered[0]]
    first = keras.utils.unpack_x_y_sample_weight(next(iter(source.batches(0, 0, 1))))[0]
    # Keras takes arrays or tensors, not both.
    first = tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, first
    )
    return keras.tree.pack_sequence_as(model.predict_step((first,)), arrays)
