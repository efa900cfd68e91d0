"""The results of `predict`, in the same structure as in Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.compute.registry import backend
from elasticcb.data.batches import BatchSource
from elasticcb.keras_private import joined_outputs
from elasticcb.model.metric_messages import Outputs, unflatten_outputs


def whole_predictions(model: keras.Model, source: BatchSource, parts: Mapping[int, Sequence[Outputs]]) -> Any:
    """Concatenates the outputs of all batches, in the structure of the model's outputs."""
    batches = [keras.tree.flatten(unflatten_outputs(batch)) for start in sorted(parts) for batch in parts[start]]
    wholes = [_joined(leaves) for leaves in zip(*batches, strict=True)]
    # Keras accepts arrays or tensors, not both.
    first = tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf,
        next(iter(source.batches(0, 0, 1))),
    )
    return keras.tree.pack_sequence_as(backend().outputs(model, first), wholes)


def _joined(leaves: Sequence[Any]) -> Any:
    """One output over all batches, concatenated like `keras.Model.predict` does."""
    if all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves) and len({x.shape[1:] for x in leaves}) == 1:
        return np.concatenate(leaves)  # like Keras, without copies
    tensors = [tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    return joined_outputs(tensors)
