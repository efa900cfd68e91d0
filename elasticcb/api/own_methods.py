"""Models that override `fit`, `evaluate` or `predict` themselves."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import keras

from elasticcb.errors import UsageError
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.settings.training import is_due

Method = TypeVar("Method", bound=Callable[..., Any])


def with_own_method(method: Method) -> Method:
    """Wraps a method of `Cluster`, of the same name as one of `keras.Model`: for a model that overrides it, the model's
    own method is called, in which `super()` leads to the cluster."""
    name = method.__name__

    @functools.wraps(method)
    def call(cluster: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, keras.Model) or not is_overridden(model, name):
            return method(cluster, model, *args, **kwargs)
        with _replaced(name, model, functools.partial(method, cluster)) as calls:
            result = getattr(model, name)(*args, **kwargs)
        if not calls:
            warnings.warn(
                f"{type(model).__name__}.{name} ran in this process, not on the cluster: it does not call "
                f"super().{name}(...).",
                RuntimeWarning,
                stacklevel=2,
            )
        return result

    return cast(Method, call)


_changing = threading.Lock()
_instead: dict[str, dict[int, Callable[..., Any]]] = {}  # by method of `keras.Model`, and id of the model
_originals: dict[str, Any] = {}  # methods of its own, such as a tracker's; None: it is a base class's


@contextlib.contextmanager
def _replaced(name: str, model: keras.Model, instead: Callable[..., Any]) -> Iterator[list[str]]:
    """In the context, `keras.Model`'s method calls `instead` for this model; yields a list with an item per call.
    Several threads may do so, each with models of its own."""
    calls: list[str] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return instead(model, *args, **kwargs)

    with _changing:
        models = _instead.setdefault(name, {})
        if not models:
            _originals[name] = vars(keras.Model).get(name)
            _lead(name, models)
        before = models.get(id(model))
        models[id(model)] = call
    try:
        yield calls
    finally:
        with _changing:
            if before is None:
                del models[id(model)]
            else:
                models[id(model)] = before
            if not models:
                delattr(keras.Model, name)
                original = _originals.pop(name)
                if original is not None:
                    setattr(keras.Model, name, original)


def _lead(name: str, models: Mapping[int, Callable[..., Any]]) -> None:
    """Lets `keras.Model`'s method call those of `models`."""
    original = getattr(keras.Model, name)

    @functools.wraps(original)
    def call(own: keras.Model, *args: Any, **kwargs: Any) -> Any:
        found = models.get(id(own))
        return original(own, *args, **kwargs) if found is None else found(*args, **kwargs)

    setattr(keras.Model, name, call)


def validated_here(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    frequency: int | Sequence[int],
    validation_data: Any,
    batch_size: int | None,
    steps: int | None,
) -> keras.callbacks.Callback:
    """For a model that overrides `evaluate`: a callback that calls it like `fit`, and adds the results to the logs."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
    if inspect.isgenerator(x):
        raise UsageError(
            f"{type(model).__name__} overrides evaluate, so this process validates, once per epoch, and "
            "validation_data is a generator, which can be read only once. Pass a keras.utils.PyDataset, a "
            "tf.data.Dataset or arrays."
        )

    def validate(epoch: int, logs: dict[str, Any]) -> None:
        if not is_due(frequency, epoch):
            return
        found = model.evaluate(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps=steps,
            callbacks=keras.callbacks.CallbackList(list(callbacks), model=model),
            return_dict=True,
        )
        both = {**logs, **{f"val_{name}": value for name, value in found.items()}}
        logs.clear()
        logs.update(sorted(both.items()))  # Keras's order

    return keras.callbacks.LambdaCallback(on_epoch_end=validate)
