"""The rehearsal: before training, each worker computes the first batch in inference mode, as the caller did.

A difference shows that something of the program did not reach the worker as it was, before any work is done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elasticcb.compute.first_batch import kept
from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.keras_private import layers_of, takes_training

# Relative differences between processes on other machines, by the least exact dtype of the model.
_TOLERANCES = {"float16": 3e-2, "bfloat16": 3e-2, "float32": 1e-3, "float64": 1e-6}
_MOST_BYTES = 1 << 16  # of each array, for the digest
_REASONS = (
    "Something that the model depends on did not reach the worker: look for environment variables, files, attributes "
    "that __getstate__ leaves out, and state of installed packages. If the difference is intended, pass "
    "rehearsal=False to Cluster."
)


@dataclass(frozen=True)
class Rehearsal:
    """What the caller computed: results of the batch and the weights with this digest, by name."""

    digest: bytes
    results: Mapping[str, float]
    tolerance: float

    def check(self, results: Mapping[str, float], error: Exception | None) -> None:
        """Raises `ModelFileError` when a worker's results differ, or lack something because of an error."""
        for name, expected in self.results.items():
            found = results.get(name)
            if found is None and error is not None:
                raise ModelFileError(
                    "The model fails on this worker, but not in your process, for the first batch, in inference mode, "
                    f"so training was not started: {describe(error)}\n{_REASONS}",
                    user_traceback(error),
                ) from error
            if found is None or not np.isclose(
                found, expected, rtol=self.tolerance, atol=self.tolerance * 1e-2, equal_nan=True
            ):
                shown = "nothing" if found is None else f"{found:.6g}"
                raise ModelFileError(
                    f"The model computes something else on this worker than in your process: for the first batch, in "
                    f"inference mode, {name} is {shown} here and {expected:.6g} there. So training was not started. "
                    f"{_REASONS}"
                )


def digest_of(batch: Any) -> bytes:
    """Recognizes a batch of the input pipeline, and weights, which a callback may have set."""
    digest = hashlib.sha256()
    for leaf in keras.tree.flatten(batch):
        array = np.asarray(leaf) if not hasattr(leaf, "flat_values") else np.asarray(leaf.flat_values)
        digest.update(f"{array.shape} {array.dtype}".encode())
        head = array.reshape(-1)[: _MOST_BYTES // max(1, array.itemsize)]
        digest.update(repr(head.tolist()).encode() if array.dtype == object else head.tobytes())
    return digest.digest()


def rehearsed(model: keras.Model, data: Any) -> tuple[dict[str, float], Exception | None]:
    """Loss, metrics and mean absolute outputs for a batch in inference mode, with the current weights; those that the
    model can compute outside of its own steps, and the error that stopped it. Metrics then include the batch: reset
    them.
    """
    results: dict[str, float] = {}
    try:
        with kept(model):
            _rehearse_into(results, model, data)
    except Exception as error:
        return results, error
    return results, None


def _rehearse_into(results: dict[str, float], model: keras.Model, data: Any) -> None:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    outputs = model(x, training=False) if takes_training(model) else model(x)
    for index, leaf in enumerate(keras.tree.flatten(outputs)):
        array = np.asarray(keras.ops.convert_to_numpy(leaf))
        if array.dtype.kind in "fiub" and array.size:
            results[f"the mean of the absolute output {index}"] = float(np.mean(np.abs(array.astype(np.float64))))
    if y is not None:
        loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=False)
        results["the loss"] = float(keras.ops.convert_to_numpy(loss))
        for name, value in model.compute_metrics(x, y, outputs, sample_weight=sample_weight).items():
            if name != "loss":  # whose tracker only steps update
                results[f"the metric {name!r}"] = float(keras.ops.convert_to_numpy(value))


def rehearse(model: keras.Model, batch: Any, data: Any) -> Rehearsal | None:
    """What workers are to compute for a batch; None where it is random even in inference mode.

    Args:
        batch: the batch of the input pipeline.
        data: the same, in the backend's form.
    """
    (first, _), (second, _) = rehearsed(model, data), rehearsed(model, data)
    same = first.keys() == second.keys() and all(np.isclose(first[name], second[name]) for name in first)
    if not first or not same:
        return None
    dtypes = {keras.backend.standardize_dtype(layer.compute_dtype) for layer in layers_of(model)}
    tolerance = max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return Rehearsal(digest_of((batch, model.weights)), first, max(tolerance, _TOLERANCES["float64"]))
