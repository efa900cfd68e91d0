"""What a model's `train_step` hands to its optimizers: kept, instead of applied."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from elasticcb.compute.tensorflow.late_reads import LateReads
from elasticcb.compute.tensorflow.loss_scale import plain_gradient
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.step_logs import flat_logs
from elasticcb.optimizers.traits import MultiOptimizer, model_optimizers, unwrapped
from elasticcb.optimizers.variables import chosen_optimizer


class Update(NamedTuple):
    """The gradient of one variable, as the model computed it: of the scaled loss, if the optimizer scales it."""

    optimizer: int  # index in `model_optimizers(model)`
    gradient: Any  # tensor or IndexedSlices


class OptimizerCapture:
    """Makes every optimizer of a model keep what it is given, from now on.

    Args:
        model: whose optimizers these are.
        variables: indices in `model.weights` of those whose gradients are kept, alone; the optimizers apply the others
            as ever. None: all are kept.
        refuses: steps are refused that servers can't do by gradients. Others may do what Keras does.

    Attributes:
        optimizers: of the model; `Update.optimizer` counts them.
    """

    def __init__(self, model: keras.Model, variables: Collection[int] | None = None, refuses: bool = True) -> None:
        self._model = model
        self._variables, self._refuses = variables, refuses
        self.optimizers = model_optimizers(model)
        self._given: list[tuple[int, Any, Any, Any]] = []  # (optimizer, gradient, variable, graph)
        self._late_reads = LateReads()
        if variables is None or variables:
            for index in range(len(self.optimizers)):
                self._replace_apply(index)

    def _replace_apply(self, index: int) -> None:
        optimizer = self.optimizers[index]

        def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            if trainable_variables is None:
                trainable_variables = getattr(optimizer, "_trainable_variables", None) or self._model.trainable_weights
            if len(grads) != len(trainable_variables):
                raise ModelFileError(
                    f"The optimizer {optimizer.name!r} was given {len(grads)} gradients for "
                    f"{len(trainable_variables)} variables; there must be one for each, or None."
                )
            graph = _graph()
            pairs = list(zip(grads, trainable_variables, strict=True))
            if self._variables is not None:
                pairs = self._apply_others(optimizer, pairs)
            self._given += [(index, gradient, variable, graph) for gradient, variable in pairs]
            if self._refuses:
                self._late_reads.given(
                    [variable for gradient, variable in pairs if gradient is not None], optimizer.name
                )

        # Keras's own `apply_gradients` calls it. Around Keras's __setattr__, which tracks what it is given.
        object.__setattr__(optimizer, "apply", apply)

    def _apply_others(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Applies the gradients that are not to be kept; answers the others, of the plain loss."""
        keys = {_key(self._model.weights[index]) for index in self._variables or ()}
        kept = [
            (plain_gradient(optimizer, gradient), variable)
            for gradient, variable in pairs
            if _key(variable) in keys and gradient is not None
        ]
        others = [(gradient, variable) for gradient, variable in pairs if _key(variable) not in keys]
        for each, own in _by_optimizer(optimizer, others):
            if own:
                type(each).apply(each, *zip(*own, strict=True))
            else:
                unwrapped(each)._iterations.assign_add(1)
        if isinstance(optimizer, MultiOptimizer):  # it counts for itself
            optimizer._iterations.assign_add(1)
        return kept

    def release(self) -> None:
        """Gives the optimizers their own `apply` back."""
        for optimizer in self.optimizers:
            vars(optimizer).pop("apply", None)

    def train_step(self, batch: Any) -> tuple[dict[str, Any], dict[int, Update]]:
        """The logs of the model's `train_step`, and the gradients that it gave, by index in `model.weights`.

        Raises:
            ModelFileError: there are none, or servers can't apply them as `train_step` wants it.
        """
        self._given.clear()
        with self._late_reads.refused():
            logs = self._model.train_step(batch)
            updates = self._take()  # what it refuses is told first
        return flat_logs(logs), updates

    def _take(self) -> dict[int, Update]:
        given, self._given = self._given, []
        # Now, since layers may have been built in the step.
        indices = {_key(variable): index for index, variable in enumerate(self._model.weights)}
        updates: dict[int, Update] = {}
        for optimizer, gradient, variable, graph in given:
            if gradient is None:
                continue
            index = indices.get(_key(variable))
            if not self._refuses and self._variables is None:
                if index is not None:
                    updates.setdefault(index, Update(optimizer, gradient))
                continue
            self._check_graph(optimizer, graph)
            if index is None:
                raise ModelFileError(
                    f"The optimizer {self._named(optimizer)} was given a gradient of {_path(variable)!r}, which is no "
                    "weight of the model, so that no server holds it. Make it a keras.Variable that is an attribute "
                    "of the model or of one of its layers."
                )
            if index in updates:
                raise self._second_update(updates[index].optimizer, optimizer, variable)
            updates[index] = Update(optimizer, gradient)
        if not updates and self._refuses:
            raise ModelFileError(
                "The model's train_step gave the optimizer no gradients. Either no layer is trainable, or the "
                "loss does not depend on the weights, or its optimizer is no attribute of the model: it must be "
                "`model.optimizer`, or an attribute of the model or of one of its layers."
            )
        return updates

    def _second_update(self, first: int, second: int, variable: Any) -> ModelFileError:
        which = f"to the optimizer {self._named(first)} twice"
        if first != second:
            which = f"to two optimizers, {self._named(first)} and {self._named(second)}"
        return ModelFileError(
            f"The model's train_step gives gradients of {_path(variable)!r} {which}. A step runs on weights that were "
            "pulled before it, and servers apply its gradients after it, so a variable can be updated once per step. "
            "Add up the gradients and apply them once; or do one update per batch (of a critic that is to be updated "
            "more often than a generator: train it on every batch, and give the generator's gradients weight zero in "
            "the others)."
        )

    def _check_graph(self, optimizer: int, graph: Any) -> None:
        if graph is not _graph():
            raise ModelFileError(
                f"The optimizer {self._named(optimizer)} is applied inside a tf.cond, a loop or a function of its own "
                "(@tf.function, keras.ops.cond), where its gradients can't be taken out of. Call it from train_step "
                "itself: leave the decorator out (the whole step is compiled anyway), and instead of a condition "
                "multiply the gradients with 0 or 1."
            )

    def _named(self, index: int) -> str:
        return f"{self.optimizers[index].name!r}"


def updated_variables(model: keras.Model, batch: Any, refuses: bool = True) -> dict[int, int]:
    """Which variables `train_step` updates: by index in `model.weights`, the index of the optimizer.

    The step is traced, not run; what `run_eagerly` makes run leaves the model as it was.

    Args:
        refuses: as of `OptimizerCapture`.
    """
    capture = OptimizerCapture(model, refuses=refuses)
    found: dict[int, Update] = {}

    def step(data: Any) -> None:
        found.clear()
        found.update(capture.train_step(data)[1])

    try:
        if model.run_eagerly:
            with unchanged(model.variables):
                step(batch)
        else:
            tf.function(step, autograph=False).get_concrete_function(batch)
    finally:
        capture.release()
    return {index: update.optimizer for index, update in found.items()}


@contextlib.contextmanager
def unchanged(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Gives the variables their values back at the end."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _by_optimizer(optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """Gradients by the optimizer that applies them. Those inside a MultiOptimizer, which itself takes all or none."""
    if not isinstance(optimizer, MultiOptimizer):
        return [(optimizer, pairs)]
    inner = [each for each in optimizer.optimizers if each.built]
    return [(each, [pair for pair in pairs if chosen_optimizer(optimizer, pair[1]) is each]) for each in inner]


def _graph() -> Any:
    """That is being traced; None where nothing is."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _key(variable: Any) -> int:
    """The same for a Keras variable and the tf.Variable within it, which a GradientTape lists."""
    return id(getattr(variable, "_value", variable))


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
