"""`SidecarEvaluator`: evaluates the checkpoints of a model during its training."""

# mypy: allow-subclassing-any

from __future__ import annotations

import inspect
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

from elasticcb.callbacks.dispatch import HookLogs
from elasticcb.checkpoint.manifest import check_variables, read_manifest
from elasticcb.checkpoint.parts import load_slices
from elasticcb.errors import CheckpointError, UsageError
from elasticcb.layers.table_layers import install
from elasticcb.model.weights import variable_specs
from elasticcb.sharding.partition import partition
from elasticcb.sharding.table_state import TableSpec, whole
from elasticcb.sidecar.follower import (
    POLL_SECONDS,
    Checkpoint,
    CheckpointFollower,
    CheckpointKind,
    Shape,
    saved_variables,
)

logger = logging.getLogger(__name__)
_SHOWN = 5


@dataclass(frozen=True)
class Evaluation:
    """One evaluated checkpoint."""

    checkpoint: Path
    version: int | None  # model version; None if the checkpoint does not contain it
    metrics: dict[str, float] = field(default_factory=dict)  # as returned by `model.evaluate(return_dict=True)`


class SidecarEvaluator:
    """Follows a folder of checkpoints and evaluates each new one, in a separate process from the training.

    It supports checkpoints of ElasticCB's jobs and the `.keras` and `.weights.h5` files of
    `keras.callbacks.ModelCheckpoint`. The arguments have the same meaning as for tf.keras's SidecarEvaluator.

    Args:
        model: a compiled model with the metrics to evaluate, and the same variables as the trained model.
        data: a tuple `(x, y)` or `(x, y, sample_weight)`, or any other `x` that `model.evaluate` accepts. It is read
            once per checkpoint.
        checkpoint_dir: folder of the checkpoints, which need not exist yet; or a single file that is overwritten.
        steps: number of batches of each evaluation; None: all batches of `data`.
        max_evaluations: maximum number of checkpoints that `start` evaluates; None: no limit.
        callbacks: their `on_test_*` hooks are called. `logs` of `on_test_end` also contains "version", and "metrics":
            all results as a dict. `model.optimizer.iterations` is the
            version, which Keras's TensorBoard callback uses as its step.
        timeout: `start` returns after this many seconds without a new checkpoint; None: it waits forever.
        batch_size: batch size for data that is not batched; None: Keras's default.
        poll_seconds: polling interval; a file must stay unchanged for this long.
        verbose: 1: print a line per evaluation; 0: print nothing.

    Raises:
        UsageError: the model is not compiled, or an argument is invalid.

    Example:

        evaluator = SidecarEvaluator(model, (x_test, y_test), "checkpoints", timeout=600)
        for evaluation in evaluator.start():
            print(evaluation.version, evaluation.metrics["accuracy"])
    """

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        *,
        timeout: float | None = None,
        batch_size: int | None = None,
        poll_seconds: float = POLL_SECONDS,
        verbose: int = 1,
    ) -> None:
        _check(model, data, steps, max_evaluations, timeout)
        self.model = model
        self._data = dict(zip(("x", "y", "sample_weight"), data if isinstance(data, tuple) else (data,), strict=False))
        self._options = {"steps": steps, "batch_size": batch_size, "return_dict": True}
        self._max_evaluations = max_evaluations
        self._timeout = timeout
        self._verbose = verbose
        self._callbacks = list(callbacks or ())
        self._loader: _WeightsLoader | None = None
        self._follower = CheckpointFollower(checkpoint_dir, poll_seconds)

    def start(self) -> list[Evaluation]:
        """Evaluates existing checkpoints, oldest first, then each new one when it appears.

        Returns after `max_evaluations`, after `timeout` seconds without a new checkpoint, after `stop`, or on Ctrl-C,
        which cancels the running evaluation. Damaged or deleted checkpoints are skipped.

        Returns:
            The evaluations, in order.

        Raises:
            CheckpointError: a checkpoint belongs to another model.
            Exception: any error of the model, the data or a callback.
        """
        done: list[Evaluation] = []
        # One list for all evaluations; with a new list for each, TensorBoard would start a new file every time.
        callbacks = _Callbacks(self._callbacks, model=self.model, verbose=0, epochs=1, steps=self._options["steps"])
        try:
            while self._max_evaluations is None or len(done) < self._max_evaluations:
                checkpoint = self._follower.next(self._timeout)
                if checkpoint is None:
                    break
                if not self._load(checkpoint):
                    continue
                callbacks.version = checkpoint.version
                metrics = self.model.evaluate(**self._data, **self._options, verbose=0, callbacks=callbacks)
                _flush(self._callbacks)
                done.append(Evaluation(checkpoint.path, checkpoint.version, metrics))
                if self._verbose:
                    print(_line(done[-1]), flush=True)
        except KeyboardInterrupt:
            logger.info("Interrupted after %d evaluations", len(done))
        finally:
            self._follower.close()
        return done

    def stop(self) -> None:
        """Makes `start` return after the running evaluation; for callbacks and other threads."""
        self._follower.stop()

    def _load(self, checkpoint: Checkpoint) -> bool:
        if self._loader is None:
            self._build()
            self._loader = _WeightsLoader(self.model)
        try:
            self._loader.load(checkpoint)
        except ForeignCheckpointError:
            raise
        except CheckpointError as error:
            if checkpoint.is_there:  # otherwise it was pruned, like other old ones
                logger.warning("Skipped: %s", error)
            return False
        return True

    def _build(self) -> None:
        """Creates variables that Keras creates lazily, because weights can't be loaded before."""
        if self.model.built:
            return
        if inspect.isgenerator(self._data["x"]):
            raise UsageError(
                "The model has no variables yet, and they can't be created from a generator. Start the model with "
                "keras.Input, call build(input_shape), or call it on a batch first."
            )
        self.model.evaluate(**self._data, **{**self._options, "steps": 1}, verbose=0)


class _Callbacks(keras.callbacks.CallbackList):
    callbacks: list[keras.callbacks.Callback]
    version: int | None = None  # of the checkpoint

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        callbacks, self.callbacks = self.callbacks, []
        super().on_test_end(logs)  # waits for hooks of batches that are called in the background
        self.callbacks = callbacks
        results = dict(logs or {})
        given = HookLogs(results, metrics=results, version=self.version)
        for callback in self.callbacks:
            callback.on_test_end(given)


def _check(model: Any, data: Any, steps: int | None, max_evaluations: int | None, timeout: float | None) -> None:
    if not getattr(model, "compiled", False):
        raise UsageError(
            f"The model {getattr(model, 'name', model)!r} is not compiled, so there is nothing to evaluate. Call "
            "model.compile(loss=..., metrics=[...])."
        )
    if isinstance(data, tuple) and not 1 <= len(data) <= 3:
        raise UsageError(
            f"data is a tuple of {len(data)}. Expected (x, y) or (x, y, sample_weight); pass several inputs as a list "
            "or a dict: ([x1, x2], y)."
        )
    if inspect.isgenerator(data) and steps is None:
        raise UsageError(
            "data is a generator, which is exhausted by the first evaluation. Pass `steps` with an endless "
            "generator, or use a tf.data.Dataset, a keras.utils.PyDataset or arrays."
        )
    for name, value in (("steps", steps), ("max_evaluations", max_evaluations), ("timeout", timeout)):
        if value is not None and value <= 0:
            raise UsageError(f"{name}={value} is invalid. Expected more than 0, or None for no limit.")


def _flush(callbacks: Sequence[Any]) -> None:
    """TensorBoard flushes its files only at the end of training, which is never called here."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard):
            for writer in getattr(callback, "_writers", {}).values():
                writer.flush()


def _line(evaluation: Evaluation) -> str:
    name = evaluation.checkpoint.name if evaluation.version is None else f"Version {evaluation.version}"
    return f"{name}: " + ", ".join(f"{metric} {value:.5g}" for metric, value in evaluation.metrics.items())


class ForeignCheckpointError(CheckpointError):
    """A checkpoint belongs to another model, so later ones would fail as well."""


def load_version(model: keras.Model, folder: Path) -> int:
    """Sets the weights of a built model to those of a version of a job, or of its recovery files; returns the version.

    Raises:
        ForeignCheckpointError: it belongs to another model; the message names the variables.
        CheckpointError: it is damaged or was deleted meanwhile. The model may have some of its weights.
    """
    manifest = read_manifest(folder)
    saved = enumerate(manifest["variables"][: len(model.weights)])
    tables = {index: TableSpec.from_json(variable["table"]) for index, variable in saved if variable.get("table")}
    specs = variable_specs(model, tables=tables)
    try:
        check_variables(manifest, specs, folder)
    except CheckpointError as error:
        raise ForeignCheckpointError(str(error)) from error
    (everything,) = partition(specs, 1, split=False)
    part = load_slices(folder, specs, everything)
    for index, variable in enumerate(model.weights):
        if index in part.tables:
            table = whole(part.tables[index])
            install(model, index, table.ids, table.rows)
        else:
            variable.assign(part.weights[index])
    return part.version


class _WeightsLoader:
    """Loads checkpoints into one model.

    Args:
        model: a built model; its optimizer, if any, gets the checkpoint's version as `iterations`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # paths of the model's variables in a file; computed when needed
        self._places: Mapping[str, Shape] | None = None

    def load(self, checkpoint: Checkpoint) -> None:
        """Sets the model's weights.

        Raises:
            ForeignCheckpointError: it belongs to another model; the message names the variables.
            CheckpointError: it is damaged or was deleted meanwhile. The model may have some of its weights.
        """
        if checkpoint.kind is CheckpointKind.VERSION:
            load_version(self._model, checkpoint.content)
        else:
            self._load_file(checkpoint)
        iterations = getattr(getattr(self._model, "optimizer", None), "iterations", None)
        if iterations is not None and checkpoint.version is not None:
            iterations.assign(checkpoint.version)

    def _load_file(self, checkpoint: Checkpoint) -> None:
        self._check_file(checkpoint)
        try:
            with warnings.catch_warnings():
                # Evaluation does not need the optimizer's own variables.
                warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
                self._model.load_weights(checkpoint.content)
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"The weights of {checkpoint.path} can't be loaded: {error}") from error

    def _check_file(self, checkpoint: Checkpoint) -> None:
        """Compares variables with the model's, because Keras ignores unknown ones."""
        if self._places is None:
            self._places = _places(self._model)
        saved, own = saved_variables(checkpoint.content), self._places
        foreign = [f"{name} {shape} (in the model: {own.get(name, 'none')})" for name, shape in saved.items()
                   if own.get(name) != shape]  # fmt: skip
        if foreign:
            more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
            raise ForeignCheckpointError(
                f"The checkpoint {checkpoint.path} belongs to another model. It contains "
                f"{'; '.join(foreign[:_SHOWN])}{more}. Use the model that is being trained."
            )
        missing = [name for name in own if name not in saved]
        if missing:
            raise CheckpointError(
                f"The checkpoint {checkpoint.path} lacks {len(missing)} of the model's {len(own)} variables: "
                f"{', '.join(missing[:_SHOWN])}. It is incomplete, or belongs to another model."
            )


def _places(model: keras.Model) -> dict[str, Shape]:
    with tempfile.TemporaryDirectory(prefix="elasticcb-") as folder:
        path = Path(folder, "model.weights.h5")
        model.save_weights(path)
        return saved_variables(path)
