"""Imports the user's model file by path, checks it, and creates a compiled Keras model from it.

This module imports Keras; the command line checks names without importing it (cli/validation.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import keras

from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.model.spec import Spec, Words, input_names
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.settings import ModelSettings

# Roles of `--cluster=inprocess` are threads: they must not import the same file concurrently, nor set the process's
# random seeds while another thread draws initial weights from them.
building = threading.RLock()


class ModelSpec(Spec):
    """The definitions of a model file.

    Raises:
        ModelFileError: the file can't be imported or lacks a required name.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self.path, self._model_name = locate(settings)
        self.module = _import(settings.zoo, settings.definition.rpartition(".")[0], self.path)
        self._model_factory = self._get(self._model_name, needed=True)
        self._inputs: Sequence[str] | None = None
        self.loss_advice = (
            f"Define `{settings.loss}(labels, predictions)` in the file, or return a model that is compiled with a "
            "loss or adds its own losses."
        )

    @property
    def words(self) -> Words:
        fed_by = next((name for name in (self._settings.feed_batch, self._settings.feed) if self._get(name)), "")
        data = f"`{fed_by}` in {self.path}" if fed_by else "The data"
        return Words(f"The model of {self.path}", data, str(self.path))

    @property
    def inputs(self) -> Sequence[str] | None:
        return self._inputs

    @property
    def feed(self) -> Callable[..., Any] | None:
        return self._get(self._settings.feed)

    @property
    def feed_batch(self) -> Callable[..., Any] | None:
        return self._get(self._settings.feed_batch)

    @property
    def custom_data_reader(self) -> Callable[..., Any] | None:
        return self._get(self._settings.custom_data_reader)

    def build_model(self) -> keras.Model:
        """A new model, compiled with the definitions of the file; a model without a loss is not compiled."""
        _check_is_function(self._model_factory, self._model_name, self.path)
        model = self.call(self._model_factory, **self._settings.params)
        if not isinstance(model, keras.Model):
            raise ModelFileError(
                f"{self._model_name}() in {self.path} returned {type(model).__name__}; expected a keras.Model "
                "(Sequential, functional or subclass)."
            )
        self._inputs = input_names(model)
        if not model.compiled:
            self._compile(model)
        elif self._get(self._settings.optimizer) is not None:
            # Servers use it from there, so they need not build the model.
            model.optimizer = _scaled_like(model.optimizer, self.make_optimizer())
        return model

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """A new optimizer, as the file or its compiled model defines it."""
        factory = self._get(self._settings.optimizer)
        if factory is None:
            model = self.call(self._model_factory, **self._settings.params)
            optimizer = getattr(model, "optimizer", None)
        else:
            _check_is_function(factory, self._settings.optimizer, self.path)
            optimizer = factory if isinstance(factory, str) else self.call(factory)
        if isinstance(optimizer, str):
            try:
                optimizer = keras.optimizers.get(optimizer)
            except ValueError as error:
                raise ModelFileError(
                    f"{self._settings.optimizer} in {self.path} is {optimizer!r}, which is not the name of a Keras "
                    'optimizer. Expected a name such as "adam", or a keras.optimizers.Optimizer.'
                ) from error
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ModelFileError(
                f"{self.path} provides no valid optimizer: {optimizer!r}. Define `{self._settings.optimizer}()` to "
                f"return a keras.optimizers.Optimizer, or return a compiled model from {self._model_name}()."
            )
        return optimizer

    def make_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """New instances of all optimizers of the model, in the order of `model_optimizers`.

        Builds a model; with a single optimizer, `make_optimizer` may avoid that.
        """
        return model_optimizers(self.build_model())

    def make_eval_metrics(self) -> dict[str, Any]:
        """The result of `eval_metrics_fn()`; empty if the file has none."""
        factory = self._get(self._settings.eval_metrics_fn)
        metrics = {} if factory is None else self.call(factory)
        if not isinstance(metrics, dict):
            raise ModelFileError(
                f"{self._settings.eval_metrics_fn}() in {self.path} returned {type(metrics).__name__}; "
                "expected a dict {name: metric} or {output: {name: metric}}."
            )
        return metrics

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        """The result of `callbacks()`, and the file's `PredictionOutputsProcessor`; new objects each time."""
        factory = self._get(self._settings.callbacks)
        given = [] if factory is None else self.call(factory) or []
        if not isinstance(given, (list, tuple)):
            raise ModelFileError(
                f"{self._settings.callbacks}() in {self.path} returned {given!r}; expected a list of "
                "keras.callbacks.Callback objects."
            )
        callbacks = list(given)
        for callback in callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise ModelFileError(
                    f"{self._settings.callbacks}() in {self.path} returned {callback!r} in its list; "
                    "expected keras.callbacks.Callback objects."
                )
        processor = self._get("PredictionOutputsProcessor")
        # ElasticDL's way to process predictions: a class of this name in the model file.
        if inspect.isclass(processor) and processor.__module__ == self.module.__name__:
            from elasticcb.callbacks import PredictionOutputsProcessor

            if not issubclass(processor, keras.callbacks.Callback):
                callbacks.append(PredictionOutputsProcessor(self.call(processor).process))
            elif not any(isinstance(callback, processor) for callback in callbacks):
                callbacks.append(self.call(processor))
        return callbacks

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with building:
                return function(*args, **kwargs)
        except ElasticCBError:
            raise  # its message is sufficient
        except (Exception, SystemExit) as error:
            name = getattr(function, "__name__", repr(function))
            inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            raise ModelFileError(
                f"{name}() in {self.path} raised {describe(error)}", user_traceback(error) if inside else ""
            ) from error

    def _get(self, name: str, needed: bool = False) -> Any:
        found = getattr(self.module, name, None)
        if found is None and needed:
            public = sorted(n for n, value in vars(self.module).items() if callable(value) and n[0] != "_")
            raise ModelFileError(
                f"{self.path} has no {name!r}; it has: {', '.join(public) or 'no functions'}. Expected "
                "--model_def=folder.module.function."
            )
        return found

    def _compile(self, model: keras.Model) -> None:
        loss = self._get(self._settings.loss)
        optimizer = self._get(self._settings.optimizer)
        if optimizer is None:
            return  # sufficient for prediction; `require_trainable` raises before training
        if inspect.isclass(loss) and issubclass(loss, keras.losses.Loss):
            loss = self.call(loss)
        if isinstance(loss, (str, dict, list, keras.losses.Loss)) or _computes_its_loss(model):
            self.call(model.compile, optimizer=self.make_optimizer(), loss=loss)
            return
        model.compile(optimizer=self.make_optimizer())
        if loss is not None:
            # Keras would call a compiled loss once per output; a model file's loss gets all outputs.
            model.compute_loss = _make_compute_loss(model, loss, self.words)

    def require_trainable(self, model: keras.Model) -> None:
        if not model.compiled:
            raise ModelFileError(
                f"The model of {self.path} can't be trained: it is not compiled, and the file has no "
                f"`{self._settings.optimizer}()`. Define `{self._settings.loss}(labels, predictions)` and "
                f"`{self._settings.optimizer}()`, or return a compiled model."
            )


def _computes_its_loss(model: keras.Model) -> bool:
    """Whether the model's class overrides `compute_loss`, which may call Keras's for the compiled loss."""
    return type(model).compute_loss is not keras.Model.compute_loss


def _scaled_like(
    present: keras.optimizers.Optimizer, optimizer: keras.optimizers.Optimizer
) -> keras.optimizers.Optimizer:
    """Wraps `optimizer` to scale the loss like `present`: Keras's `compile` does so for mixed_float16."""
    scaling = keras.optimizers.LossScaleOptimizer
    if not isinstance(present, scaling) or isinstance(optimizer, scaling):
        return optimizer
    return scaling(optimizer, present.initial_scale, present.dynamic_growth_steps)


def locate(settings: ModelSettings) -> tuple[Path, str]:
    """The model file's path and the name of the model in it."""
    module, _, name = settings.definition.rpartition(".")
    path = Path(settings.zoo, *module.split(".")).with_suffix(".py")
    if not module or not path.is_file():
        raise ModelFileError(
            f"--model_def={settings.definition} names the file {path}, which does not exist. Expected "
            f"folder.module.function below --model_zoo={settings.zoo}."
        )
    return path.resolve(), name


def _check_is_function(value: Any, name: str, path: Path) -> None:
    if isinstance(value, (keras.Model, keras.optimizers.Optimizer)):
        raise ModelFileError(
            f"{name} in {path} is an object, {type(value).__name__}, but each process needs its own. Make it a "
            "function that returns a new one."
        )


def _import(zoo: str, module: str, path: Path) -> ModuleType:
    with building:
        # The zoo for `import folder.helper`, the file's own folder for `import helper`.
        for folder in (str(path.parent), str(Path(zoo).resolve())):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        try:
            found = sys.modules.get(module) or importlib.import_module(module)
            if Path(getattr(found, "__file__", None) or "").resolve() == path:
                return found
        except ImportError:
            pass  # an installed package may hide the folder; importing by path works
        except (Exception, SystemExit) as error:
            raise _import_error(path, error) from error
        return _import_by_path(re.sub(r"\W", "_", f"model_file_{path}"), path)


def _import_by_path(name: str, path: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_error(path, error) from error
    return module


def _import_error(path: Path, error: BaseException) -> ModelFileError:
    return ModelFileError(
        f"The model file {path} can't be imported: {describe(error)}",
        user_traceback(error),
    )


def _make_compute_loss(model: keras.Model, loss: Callable[..., Any], words: Words) -> Callable[..., Any]:
    """Creates `model.compute_loss`: the mean of `loss` over the batch, plus `model.losses`.

    Args:
        loss: returns one number for the batch or one per example; weighted here unless it takes a third argument, the
            sample weights (None if there are none).

    Raises:
        ModelFileError: `loss` has another signature.
    """
    call = _with_weight(loss, words)

    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        del x, training
        if y is None:
            raise ModelFileError(
                f"{words.data} gives no labels, which `loss` needs. In training and evaluation, give (features, "
                "labels) or (features, labels, sample_weight)."
            )
        total = keras.ops.mean(call(y, y_pred, sample_weight))
        for extra in model.losses:
            total = total + keras.ops.sum(keras.ops.cast(extra, total.dtype))
        return total

    return compute_loss


def _with_weight(loss: Callable[..., Any], words: Words) -> Callable[[Any, Any, Any], Any]:
    """Wraps `loss` as a function of labels, predictions and sample weights that checks its result."""
    path = words.definition
    by_name = by_position = False
    try:
        signature = inspect.signature(loss)
    except TypeError as error:
        raise ModelFileError(
            f"`loss` in {path} is {loss!r}. Expected a function of (labels, predictions), a keras.losses.Loss or its "
            "name."
        ) from error
    except ValueError:
        pass  # some functions written in C have none
    else:
        by_name = "sample_weight" in signature.parameters
        by_position = not by_name and _can_be_called(signature, 3) and not _can_be_called(signature, 2)
        if not by_name and not by_position and not _can_be_called(signature, 2):
            raise ModelFileError(
                f"`loss` in {path} takes {signature}. Expected loss(labels, predictions) or loss(labels, "
                "predictions, sample_weight)."
            )

    def call(labels: Any, predictions: Any, sample_weight: Any) -> Any:
        if by_name:
            return _checked(loss(labels, predictions, sample_weight=sample_weight), path)
        if by_position:
            return _checked(loss(labels, predictions, sample_weight), path)
        value = _checked(loss(labels, predictions), path)
        return value if sample_weight is None else _weigh(value, sample_weight, words.data)

    return call


def _can_be_called(signature: inspect.Signature, count: int) -> bool:
    """Whether it accepts `count` positional arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _checked(value: Any, path: str) -> Any:
    try:
        if value is None or isinstance(value, Mapping):
            raise TypeError("no tensor")
        tensor = keras.ops.convert_to_tensor(value)
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if not keras.backend.is_float_dtype(dtype):
            raise TypeError(f"of dtype {dtype}")
    except (TypeError, ValueError) as error:
        raise ModelFileError(
            f"`loss` in {path} returned {value!r} ({error}). Expected a floating-point tensor: one number for "
            "the batch, or one per example."
        ) from error
    return tensor


def _weigh(value: Any, sample_weight: Any, data: str) -> Any:
    if isinstance(sample_weight, Mapping):
        raise ModelFileError(
            f"{data} returns sample weights by output ({', '.join(map(str, sample_weight))}), but `loss` "
            "takes none, so it is unclear which to apply. Add a third argument `sample_weight` to `loss`."
        )
    if not len(value.shape):
        raise ModelFileError(
            f"{data} returns sample weights, but `loss` returns one number for the whole batch, so they "
            "can't be applied. Return one loss per example, or add a third argument `sample_weight`."
        )
    weight = keras.ops.cast(sample_weight, value.dtype)
    while len(weight.shape) > len(value.shape):
        weight = keras.ops.squeeze(weight, -1)
    while len(weight.shape) < len(value.shape):
        weight = keras.ops.expand_dims(weight, -1)
    return value * weight
