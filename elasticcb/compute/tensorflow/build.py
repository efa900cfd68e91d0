"""Builds what Keras builds lazily, with one real batch."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.capture import unchanged
from elasticcb.compute.tensorflow.capture import updated_variables
from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.settings import Mode


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool) -> dict[int, int] | None:
    """Builds what Keras builds lazily (weights of a subclass model, metrics), with one real batch.

    Metrics then hold that batch: reset them.

    Args:
        model: of `spec`, compiled unless `mode` is `PREDICTION`.
        batch: what the step takes: `(features, labels[, sample_weight])`, or `(features,)` for `PREDICTION`.
        local: in training, workers apply gradients themselves.

    Returns:
        In training, for a model whose step is its own or that has several optimizers: the index of the optimizer that
        updates a variable, by index in `model.weights`.

    Raises:
        ModelFileError: `feed` gives something else, or the model, its loss or its metrics can't take it.
    """
    _check_structure(spec, batch, mode)
    features = keras.utils.unpack_x_y_sample_weight(batch)[0] if isinstance(batch, tuple) else batch
    inputs = _count_inputs(model)
    if inputs and isinstance(features, tuple) and len(features) > inputs:
        # Keras would take the first and pass over the others.
        raise ModelFileError(
            f"`feed` in {spec.path} gives {len(features)} features in {mode}, and the model has {inputs} "
            f"input{'s' if inputs > 1 else ''}.{_shown(batch, mode)}"
        )
    _allow_one_named_feature(model, features)
    batch = _of_fixed_size(model, batch)
    updated: dict[int, int] | None = None
    try:
        with building:
            if mode is Mode.TRAINING:
                updated = _prime_training(model, batch, local)
            elif mode is Mode.EVALUATION:
                _run_unchanged(model, model.test_step, batch)
            else:
                _run_unchanged(model, model.predict_step, batch)
    except ModelFileError as error:
        raise ModelFileError(f"{error}{_shown(batch, mode)}", error.user_traceback) from error
    except Exception as error:
        if isinstance(error, ValueError) and "No loss to compute" in str(error):
            raise ModelFileError(f"The model of {spec.path} has no loss. {spec.loss_advice}") from error
        raise ModelFileError(
            f"The model of {spec.path} can't run on the first batch from `feed`: {describe(error)}"
            f"{_shown(batch, mode)}",
            user_traceback(error),
        ) from error
    return updated


def _prime_training(model: keras.Model, batch: Any, local: bool) -> dict[int, int] | None:
    own_step = is_overridden(model, "train_step")
    if not own_step:
        # Does all that the stock train_step does to the model, and changes no weights.
        _run_unchanged(model, functools.partial(keras.Model.test_step, model), batch)
    updated = updated_variables(model, batch, not local) if own_step or len(model_optimizers(model)) > 1 else None
    if own_step or is_overridden(model, "test_step"):
        # Evaluation rounds need its metrics. A model that can't do it may train: `fit` asks for it as late as that.
        with contextlib.suppress(Exception):
            _run_unchanged(model, model.test_step, batch)
    return updated


def _run_unchanged(model: keras.Model, step: Callable[[Any], Any], batch: Any) -> None:
    """Runs a step and leaves the model as it is, also what layers change in `call` and the seeds they draw from."""
    failed: Exception | None = None
    if not model.run_eagerly and not all(layer.built for layer in model._flatten_layers()):
        try:  # makes what is built late, without running it
            tf.function(step, autograph=False).get_concrete_function(batch)
        except Exception as error:
            failed = error
    with unchanged([*model.non_trainable_variables, *_rnn_states(model)]):
        try:
            step(batch)
        except Exception:
            if failed is None:
                raise
            raise failed from None  # the other one may be about variables that the first one left half made


def _of_fixed_size(model: keras.Model, batch: Any) -> Any:
    """The batch; its records repeated where the model takes batches of one size only."""
    try:
        size = model.inputs[0].shape[0]
    except (AttributeError, ValueError, TypeError, IndexError):
        return batch
    if size is None:
        return batch

    def repeated(tensor: Any) -> Any:
        return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])

    return tf.nest.map_structure(repeated, batch)


def _check_structure(spec: Spec, batch: Any, mode: Mode) -> None:
    if mode is not Mode.PREDICTION and isinstance(batch, tuple) and not 1 <= len(batch) <= 3:
        raise ModelFileError(
            f"`feed` in {spec.path} gives tuples of {len(batch)} in {mode}; expected (features, labels) or "
            "(features, labels, sample_weight). Put several features into a dict, or into a tuple of their own."
        )


def _allow_one_named_feature(model: keras.Model, features: Any) -> None:
    """Keras warns when a dict of one feature is given to a model of one input, though nothing can be mixed up.

    The name is worth keeping: the exported signature takes the feature by it.
    """
    if not isinstance(features, dict) or len(features) != 1:
        return
    if _count_inputs(model) == 1:
        warnings.filterwarnings("ignore", message="The structure of `inputs` doesn't match")


def _count_inputs(model: keras.Model) -> int:
    """How many tensors a functional or Sequential model takes; 0 where that can't be told."""
    try:
        return len(model.inputs or ())
    except (AttributeError, ValueError):
        return 0


def _shown(batch: Any, mode: Mode) -> str:
    parts: dict[str, Any] = {"features": batch}
    if isinstance(batch, tuple):
        parts = dict(zip(("features", "labels", "sample_weight"), batch, strict=False))
    shown = "; ".join(f"{name} {tf.nest.map_structure(_shape, part)}" for name, part in parts.items())
    hint = ""
    if mode is Mode.PREDICTION and isinstance(batch, tuple) and len(batch) == 1:
        hint = " A step gets them as `(features,)`: there are no labels in prediction."
        if isinstance(batch[0], tuple):
            hint = " In prediction, `feed` must return features alone, without labels."
    return f"\nThe batch ({mode}): {shown}.{hint}"


def _shape(tensor: Any) -> str:
    return f"{type(tensor).__name__.replace('EagerTensor', 'tensor')}{tuple(tensor.shape)} {tensor.dtype.name}"


def _rnn_states(model: keras.Model) -> list[keras.Variable]:
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN) and layer.stateful]
    return [state for layer in layers for state in keras.tree.flatten(layer.states) if state is not None]
