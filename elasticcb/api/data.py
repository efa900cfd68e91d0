"""The data of one call on its way to the workers, and the results of `predict`, in the same structure as in Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.api.job_folder import KeptFit
from elasticcb.compute.registry import backend
from elasticcb.data.batch_sources.adapt import adapt
from elasticcb.data.batch_sources.service import DataService
from elasticcb.data.batches import BatchSource
from elasticcb.keras_private import joined_outputs
from elasticcb.model.metric_messages import Outputs, unflatten_outputs


class MethodCall:
    """One `fit`, `evaluate` or `predict`.

    Args:
        service: serves the batches of data without an index.
        seed: seed for shuffling the data; None draws one.

    Attributes:
        fit: stored state of this fit, for a program with `job_dir`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        service: DataService,
        seed: int | None,
        fit: KeptFit | None,
    ) -> None:
        self.fit = fit
        self.name = name
        self.folder = folder
        self._service = service
        # From TensorFlow, as Keras does for shuffling: a draw from Python's generator would change a model's initial
        # weights.
        drawn = int(tf.random.uniform((), maxval=tf.int32.max, dtype=tf.int32))
        self.seed = drawn if seed is None else seed
        self._sources: list[BatchSource] = []

    def adapt(self, x: Any, y: Any = None, sample_weight: Any = None, *, purpose: Any, **options: Any) -> BatchSource:
        """The batches of `x`, `y` and `sample_weight`, as Keras would create them."""
        folder = self.folder / purpose
        folder.mkdir()
        source = adapt(
            x, y, sample_weight, purpose=purpose, folder=folder, seed=self.seed, service=self._service, **options
        )
        self._sources.append(source)
        if source.num_batches is not None and source.num_batches < 1:
            use = " to validate on" if purpose == "validation" else ""
            raise ValueError(
                f"`{self.name}` needs at least one batch of data{use}. Received: "
                f"batch_size={options.get('batch_size')}, and data that gives {source.num_batches} batches."
            )
        return source

    def was_read(self, *passes: int) -> None:
        """How many passes read each of the data, in the order of `adapt`."""
        for source, times in zip(self._sources, passes, strict=False):
            source.was_read(times)

    def close(self) -> None:
        for source in self._sources:
            source.close()


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
