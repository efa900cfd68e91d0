"""The first batch: a model is checked with it, with errors that explain, and what Keras builds lazily is built, for
frameworks with mutable variables.

The rehearsal: before training, each worker computes it in inference mode, as the caller did. A difference shows that
something of the program did not reach the worker as it was, before any work is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.keras_private import compute_loss, compute_output_spec, layers_of, takes_training
from elasticcb.model.spec import Spec
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.process.wording import how_many
from elasticcb.serialization.library_objects import buffers_of
from elasticcb.settings import Mode


def check_batch(spec: Spec, model: keras.Model, batch: Any, mode: Mode) -> None:
    """Raises `ModelFileError` when a batch of the input pipeline does not have the structure that the model expects."""
    _check_structure(spec, batch, mode)
    _check_labels(spec, model, batch, mode)
    features = keras.utils.unpack_x_y_sample_weight(batch)[0] if isinstance(batch, tuple) else batch
    inputs = _count_inputs(model)
    if inputs and isinstance(features, tuple) and len(features) > inputs:
        # Keras would use the first and ignore the others.
        raise ModelFileError(
            f"{spec.words.data} returns {len(features)} features in {mode}, but the model has "
            f"{how_many(inputs, 'input')}.{_shown(batch, mode)}"
        )
    _allow_one_named_feature(model, features)


@contextlib.contextmanager
def told_with_batch(
    spec: Spec, batch: Any, mode: Mode, explain: Callable[[Exception], str] = lambda error: ""
) -> Iterator[None]:
    """Converts an error of the model on its first batch to a `ModelFileError` that shows the batch."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(f"{error}{_shown(batch, mode)}", error.user_traceback) from error
    except Exception as error:
        if isinstance(error, ValueError) and "No loss to compute" in str(error):
            raise ModelFileError(f"{spec.words.model} has no loss. {spec.loss_advice}") from error
        if advice := _advice(error):
            vars(error).setdefault("__notes__", []).append(advice)  # which Python shows from 3.11 on
        raise ModelFileError(
            f"{spec.words.model} can't run on the first batch: "
            f"{explain(error) or describe(error)}{advice}{_shown(batch, mode)}",
            user_traceback(error),
        ) from error


_ADVICE = {
    "must have the same rank": (
        'A loss that is a name or an object, such as loss = "binary_crossentropy", matches labels of shape (batch,) '
        "and outputs of shape (batch, 1), as in `compile`. In a function, match them: labels[:, None]."
    ),
    "Cast string to": (
        "Strings need a layer that takes them: elasticcb.layers.Embedding, keras.layers.StringLookup or "
        "keras.layers.Hashing. If it is a column of numbers or dates, set `column_dtypes`: the error then names a "
        "record that differs."
    ),
}


def _advice(error: Exception) -> str:
    found = [advice for words, advice in _ADVICE.items() if words in str(error)]
    return "".join(f"\n{advice}" for advice in found)


def fixed_batch_size(model: keras.Model) -> int | None:
    """The number of records that a batch must have, if the model only accepts batches of one size."""
    try:
        size = model.inputs[0].shape[0]
    except (AttributeError, ValueError, TypeError, IndexError):
        return None
    return None if size is None else int(size)


def _check_structure(spec: Spec, batch: Any, mode: Mode) -> None:
    if mode is not Mode.PREDICTION and isinstance(batch, tuple) and not 1 <= len(batch) <= 3:
        raise ModelFileError(
            f"{spec.words.data} returns tuples of {len(batch)} in {mode}; expected (features, labels) or "
            "(features, labels, sample_weight). Put several features into a dict or a nested tuple."
        )


def _check_labels(spec: Spec, model: keras.Model, batch: Any, mode: Mode) -> None:
    own = "compute_loss", "train_step" if mode is Mode.TRAINING else "test_step"
    if mode is Mode.PREDICTION or not getattr(model, "loss", None) or any(is_overridden(model, name) for name in own):
        return
    if keras.utils.unpack_x_y_sample_weight(batch)[1] is None:
        text = (
            f"{spec.words.data} gives no labels in {mode}, which the model's loss needs. Expected (features, labels) "
            f"or (features, labels, sample_weight).{_shown(batch, mode)}"
        )
        raise ModelFileError(text) from ValueError(text)  # which Keras raises, in other words


def _allow_one_named_feature(model: keras.Model, features: Any) -> None:
    """Keras warns when a model with one input is given a dict with one feature, although this is unambiguous.

    The name is useful: the exported signature uses it.
    """
    if not isinstance(features, dict) or len(features) != 1:
        return
    if _count_inputs(model) == 1:
        warnings.filterwarnings("ignore", message="The structure of `inputs` doesn't match")


def _count_inputs(model: keras.Model) -> int:
    """Number of input tensors of a functional or Sequential model; 0 if unknown."""
    try:
        return len(model.inputs or ())
    except (AttributeError, ValueError):
        return 0


def _shown(batch: Any, mode: Mode) -> str:
    parts: dict[str, Any] = {"features": batch}
    if isinstance(batch, tuple):
        parts = dict(zip(("features", "labels", "sample_weight"), batch, strict=False))
    shown = "; ".join(f"{name} {keras.tree.map_structure(_shape, part)}" for name, part in parts.items())
    hint = ""
    if mode is Mode.PREDICTION and isinstance(batch, tuple) and len(batch) == 1:
        hint = " A step gets them as `(features,)`: there are no labels in prediction."
        if isinstance(batch[0], tuple):
            hint = " In prediction, the data must be only features, without labels."
    return f"\nThe batch ({mode}): {shown}.{hint}"


def _shape(tensor: Any) -> str:
    return f"{type(tensor).__name__.replace('EagerTensor', 'tensor')}{tuple(tensor.shape)} {tensor.dtype.name}"


def make_variables(model: keras.Model, batch: Any) -> None:
    """Builds lazily created variables without running a step. Errors are ignored: they recur when it runs."""
    if not all(layer.built for layer in layers_of(model)):
        with contextlib.suppress(Exception):
            compute_output_spec(model, keras.utils.unpack_x_y_sample_weight(batch)[0])


def forward(model: keras.Model, data: Any) -> None:
    """Does everything that the stock `train_step` does to the model, without changing weights."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    predicted = model(x, training=True) if takes_training(model) else model(x)
    compute_loss(model, x, y, predicted, weight)
    model.compute_metrics(x, y, predicted, sample_weight=weight)


@contextlib.contextmanager
def unchanged(variables: Sequence[Any]) -> Iterator[None]:
    """Restores the variables' values at the end."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def kept(model: keras.Model) -> Iterator[None]:
    """Undoes lasting changes of a step in the context: those by layers in `call`, and the seeds that they use. The
    states of an RNN that the step has built are zero, as `build` leaves them."""
    before = [layer for layer in _stateful(model) if layer.states is not None]
    states = [state for layer in before for state in keras.tree.flatten(layer.states)]
    with unchanged([*model.non_trainable_variables, *states, *buffers_of(layers_of(model))]):
        yield
    for layer in _stateful(model):
        if not any(layer is each for each in before):
            layer.reset_state()


def _stateful(model: keras.Model) -> list[keras.layers.RNN]:
    return [layer for layer in layers_of(model) if isinstance(layer, keras.layers.RNN) and layer.stateful]


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
