"""Trains a program by Keras's own `fit` and by a cluster's, and compares what it ends with."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np

from catalogue import BATCH, Case, Given

EPOCHS = 2
SAME = 1e-6  # between an evaluation on a cluster, and one of the weights that came back


def assert_close(found: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Within `tolerance` of the largest value, or of 1% for what is all but zero."""
    for ours, theirs in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        ours, theirs = np.asarray(ours, "float64"), np.asarray(theirs, "float64")
        scale = max(np.abs(theirs).max(initial=0), 1e-2)
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale, err_msg=what)


def assert_histories_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert_close(found[name], values, max(SAME, tolerance), name)  # metrics are float32


def reset_states(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            layer.reset_state()


@contextlib.contextmanager
def globals_of_keras():
    """Puts back what a program changes of Keras."""
    before = (
        keras.config.epsilon(),
        keras.config.floatx(),
        keras.config.image_data_format(),
        keras.config.dtype_policy(),
    )
    try:
        yield
    finally:
        keras.config.set_epsilon(before[0])
        keras.config.set_floatx(before[1])
        keras.config.set_image_data_format(before[2])
        keras.config.set_dtype_policy(before[3])


def train(given: Given, fit: Any) -> list[dict[str, Any]]:
    """The histories of a program whose `fit` is a function of the model and its arguments."""
    validation = [part for part in (given.x, given.y, given.sample_weight) if part is not None]
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "sample_weight": given.sample_weight}
    options["validation_data"] = tuple(validation) if len(validation) > 1 else given.x
    if has_batch_size(given.x):
        options["batch_size"] = BATCH
    histories = [fit(given.model, given.x, given.y, **{**options, **given.options}).history]
    if given.then is not None:
        histories.append(given.then(fit).history)
    return histories


def has_batch_size(x: Any) -> bool:
    """Whether Keras makes the batches."""
    return isinstance(x, (np.ndarray, dict, list, tuple)) or type(x).__name__ in (
        "DataFrame", "EagerTensor", "SparseTensor", "RaggedTensor",
    )  # fmt: skip


def compare_with_fit(cluster: Any, case: Case) -> None:
    with globals_of_keras():
        given = case.make()
        expected = train(given, lambda model, *data, **options: model.fit(*data, **options))
        after = given.after()
        again = case.make()
        found = train(again, lambda model, *data, **options: cluster.fit(model, *data, **options))
        for ours, theirs in zip(found, expected, strict=True):
            assert_histories_equal(ours, theirs, case.tolerance)
        assert_close(again.model.get_weights(), given.model.get_weights(), case.tolerance)
        assert_close(again.after(), after, case.tolerance)
        compare_calls(cluster, again, case.tolerance)


def compare_calls(cluster: Any, given: Given, tolerance: float) -> None:
    """`evaluate` and `predict` of a cluster with Keras's, of the model that was trained."""
    if given.test == ():
        return
    (x, y), model = given.test or (given.x, given.y), given.model
    size = {"batch_size": BATCH} if has_batch_size(x) else {}
    weight = None if given.test else given.sample_weight
    test = {**size, "sample_weight": weight, "verbose": 0, "return_dict": True}
    logs = results(functools.partial(model.evaluate, x, y, **test), model)
    found = results(functools.partial(cluster.evaluate, model, x, y, **test), model)
    assert list(found) == list(logs)
    assert_close(found, logs, max(SAME, tolerance))
    predictions = results(functools.partial(model.predict, x, **size, verbose=0), model)
    found = results(functools.partial(cluster.predict, model, x, **size, verbose=0), model)
    assert keras.tree.map_structure(np.shape, found) == keras.tree.map_structure(np.shape, predictions)
    assert_close(found, predictions, max(SAME, tolerance))


def results(call: Any, model: keras.Model) -> Any:
    reset_states(model)
    return call()
