"""The serialized job of `Cluster.fit` (model, data, callbacks), sent from the caller to workers and servers.

It is pickled, so it is only sent to and read by processes with the job's token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import cloudpickle
import keras

from elasticcb.data.batches import BatchSource
from elasticcb.errors import ElasticCBError, ModelFileError, UsageError, describe, user_traceback
from elasticcb.model.model_file import building
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.process.import_path import adopt_path, caller_path
from elasticcb.serialization import keras_config, pickling
from elasticcb.serialization.model_archive import restore_model, save_model
from elasticcb.settings import Mode

_NAME = "the model"
LOSS_ADVICE = "Pass a loss to `compile`, or let the model add its own losses."


@dataclass(frozen=True)
class Program:
    """A model, its data by mode, and the callbacks that run on workers."""

    model: keras.Model
    sources: Mapping[str, BatchSource]
    callbacks: Sequence[keras.callbacks.Callback] = ()

    def dumps(self) -> bytes:
        """Serializes it for `ProgramSpec`.

        Raises:
            UsageError: the model or another part can't be pickled.
        """
        names = ", ".join(type(callback).__name__ for callback in self.callbacks)
        optimizers = model_optimizers(self.model)
        for optimizer in optimizers:
            _check_is_sent_whole(optimizer)
        parts = _Parts(
            sys_path=caller_path(),
            floatx=keras.config.floatx(),
            dtype_policy=keras.config.dtype_policy().name,
            constraints=_constraint_classes(self.model),
            model=save_model(self.model),
            optimizers=pickling.dumps(keras_config.write(optimizers), "An optimizer", self.model, refers=False),
            exclusions=[_exclusions(optimizer) for optimizer in optimizers],
            sources=pickling.dumps(dict(self.sources), "The data"),
            callbacks=pickling.dumps(list(self.callbacks), f"A callback ({names})", self.model),
        )
        return cast(bytes, cloudpickle.dumps(parts))


@dataclass(frozen=True)
class _Parts:
    """Each part is unpickled separately, where and when it is needed."""

    sys_path: list[str]
    floatx: str
    dtype_policy: str
    constraints: bytes
    model: bytes
    optimizers: bytes
    exclusions: list[dict[str, Any]]
    sources: bytes
    callbacks: bytes
    made: dict[str, Any] = field(default_factory=dict)


class ProgramSpec:
    """A serialized job where it runs, with the interface of a model file's `ModelSpec`.

    Args:
        data: result of `Program.dumps`.
    """

    path = _NAME
    loss_advice = LOSS_ADVICE
    feed = None
    custom_data_reader = None

    def __init__(self, data: bytes) -> None:
        parts: _Parts = cloudpickle.loads(data)
        self._parts = parts
        with building:
            # The caller's modules are imported from the same paths as in the caller.
            adopt_path(parts.sys_path)
            keras.config.set_floatx(parts.floatx)
            keras.config.set_dtype_policy(parts.dtype_policy)
            # Servers create constraints from their configs.
            keras.saving.get_custom_objects().update(pickling.loads(parts.constraints))
        self._model: keras.Model | None = None
        self._sources: dict[str, BatchSource] | None = None

    def batch_source(self, mode: Mode) -> BatchSource | None:
        if self._sources is None:
            self._sources = pickling.loads(self._parts.sources)
        return self._sources.get(mode)

    def build_model(self) -> keras.Model:
        self._model = self.call(restore_model, self._parts.model)
        return self._model

    def make_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """New instances of the optimizers of the caller's model."""
        made: list[keras.optimizers.Optimizer] = self.call(
            lambda: keras_config.read(pickling.loads(self._parts.optimizers))
        )
        for optimizer, exclusions in zip(made, self._parts.exclusions, strict=True):
            vars(_inner(optimizer)).update(exclusions)
        return made

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        return self.make_optimizers()[0]

    def make_eval_metrics(self) -> dict[str, Any]:
        return {}  # the compiled model has them all

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        callbacks: list[keras.callbacks.Callback] = pickling.loads(self._parts.callbacks, self._model)
        return callbacks

    def require_trainable(self, model: keras.Model) -> None:
        """The caller of `fit` has checked it."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call_user(function, *args, **kwargs)


class CallerSpec:
    """The job in the process of its caller: the caller's own model and callbacks."""

    path = _NAME
    loss_advice = LOSS_ADVICE
    feed = None
    custom_data_reader = None

    def __init__(self, program: Program, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._program = program
        self._callbacks = list(callbacks)

    def batch_source(self, mode: Mode) -> BatchSource | None:
        return self._program.sources.get(mode)

    def build_model(self) -> keras.Model:
        return self._program.model

    def make_optimizers(self) -> list[keras.optimizers.Optimizer]:
        return model_optimizers(self._program.model)

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        return self.make_optimizers()[0]

    def make_eval_metrics(self) -> dict[str, Any]:
        return {}

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        return self._callbacks

    def require_trainable(self, model: keras.Model) -> None:
        """The caller of `fit` has checked it."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call_user(function, *args, **kwargs)


def call_user(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the user's code; its errors become `ModelFileError`s."""
    try:
        with building:
            return function(*args, **kwargs)
    except ElasticCBError:
        raise
    except Exception as error:
        raise ModelFileError(
            f"{_NAME} can't be used in this process: {describe(error)}", user_traceback(error)
        ) from error


def _constraint_classes(model: keras.Model) -> bytes:
    used = [variable.constraint for variable in model.weights if variable.constraint is not None]
    for constraint in used:
        if keras_config.is_as_it_is(type(constraint)) and vars(constraint):
            raise UsageError(
                f"The constraint {type(constraint).__name__} has attributes ({', '.join(vars(constraint))}) but no "
                "get_config(), so servers can't create it. Implement get_config() with its arguments."
            )
    own = {type(item).__name__: type(item) for item in used if not type(item).__module__.startswith("keras.")}
    named = {keras.saving.get_registered_name(kind): kind for kind in own.values()}
    return pickling.dumps({**own, **named}, "A constraint", model, refers=False)


def _inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _exclusions(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The settings of `exclude_from_weight_decay`, which are not part of Keras's config."""
    names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    return {name: value for name, value in vars(_inner(optimizer)).items() if name in names}


def _check_is_sent_whole(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises `UsageError` for a learning rate that Keras's config does not include."""
    rate = _inner(optimizer)._learning_rate
    if callable(rate) and not isinstance(rate, (keras.Variable, keras.optimizers.schedules.LearningRateSchedule)):
        raise UsageError(
            f"The learning rate of {optimizer.name!r} is a function, which Keras can't serialize. Make it a "
            "keras.optimizers.schedules.LearningRateSchedule."
        )
