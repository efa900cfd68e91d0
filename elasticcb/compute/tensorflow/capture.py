"""Captures the gradients that a model's `train_step` passes to its optimizers, while TensorFlow traces or runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import op_callbacks  # there is no public API to observe each operation

from elasticcb.compute.capture import OptimizerCapture, Update, path_of, unchanged
from elasticcb.compute.refusals import late_read
from elasticcb.compute.tensorflow.assignments import ASSIGN
from elasticcb.compute.tensorflow.gradients import WORKER_BYTES, made_dense
from elasticcb.compute.tensorflow.loss_scale import plain_gradient
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import is_own_class
from elasticcb.optimizers.variables import StepVariables

_NO_READS = ("VariableShape", "VarIsInitializedOp", *ASSIGN)  # prefixes of operations that don't read values
# In gradients of loops and conditions, TensorFlow passes variables of which only the shapes are used.
_BACKWARDS, _CALLS = "gradient_tape/", ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")


class LateReads:
    """Watches a step from the first time that it passes gradients to an optimizer.

    Servers apply gradients after the step, so later reads in the step see values from before the update.
    """

    def __init__(self) -> None:
        # (handle, variable, optimizer, number of operations before it)
        self._given: list[tuple[Any, str, str, int]] = []
        self._found: list[tuple[str, str]] = []  # (variable, optimizer) of reads that were executed
        self._running = contextlib.ExitStack()

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Inside the context, it is an error if a step, traced or run, reads such a variable.

        Raises:
            ModelFileError: it reads one.
        """
        self._given.clear()
        self._found.clear()
        with self._running:
            yield
        found = self._found if tf.executing_eagerly() else self._traced()
        if found:
            raise late_read(found)

    def given(self, variables: Sequence[Any], optimizer: str) -> None:
        """The optimizer called `optimizer` was given gradients of these variables: Keras variables, or tf.Variables."""
        eager = tf.executing_eagerly()
        if eager and not self._given:
            op_callbacks.add_op_callback(self._note)
            self._running.callback(op_callbacks.remove_op_callback, self._note)
        before = 0 if eager else len(tf.compat.v1.get_default_graph().get_operations())
        for variable in variables:
            inner = getattr(variable, "_value", variable)
            self._given.append((inner.handle, path_of(variable), optimizer, before))

    def _note(
        self, kind: Any, inputs: Sequence[Any], attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        """Called by TensorFlow after each operation."""
        if graph is None and not tf.compat.as_str(kind).startswith(_NO_READS):
            self._found += [
                (path, optimizer)
                for handle, path, optimizer, _ in self._given
                if any(handle is tensor for tensor in inputs)
            ]

    def _traced(self) -> list[tuple[str, str]]:
        if not self._given:
            return []
        graph = tf.compat.v1.get_default_graph()
        places = {id(outer): id(own) for outer, own in getattr(graph, "captures", ())}
        given = {places.get(id(handle)): (path, name, before) for handle, path, name, before in self._given}
        found = []
        for number, operation in enumerate(graph.get_operations()):
            if operation.type.startswith(_NO_READS):
                continue
            if operation.type in _CALLS and operation.name.startswith(_BACKWARDS):
                continue
            for tensor in operation.inputs:
                if id(tensor) in given:
                    path, name, before = given[id(tensor)]
                    if number >= before:
                        found.append((path, name))
        return found


class TensorFlowCapture(OptimizerCapture):
    """For the arguments, see `OptimizerCapture`."""

    def __init__(self, model: keras.Model, variables: Collection[int] | None = None, refuses: bool = True) -> None:
        super().__init__(model, LateReads(), variables, refuses)

    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
        return plain_gradient(optimizer, gradient)

    def _applied(self, optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any) -> Any:
        if is_own_class(optimizer):  # which may update only the rows given
            return gradient
        return made_dense(gradient, variable.shape, variable.dtype, WORKER_BYTES)

    def _place(self) -> Any:
        return _graph()

    def _check_place(self, optimizer: int, place: Any) -> None:
        if place is not _graph():
            raise ModelFileError(
                f"The optimizer {self.named(optimizer)} is applied inside a tf.cond, a loop or a separate function "
                "(@tf.function, keras.ops.cond), where its gradients can't be captured. Call it directly in "
                "train_step: remove the decorator (the whole step is compiled anyway), and instead of a condition "
                "multiply the gradients by 0 or 1."
            )


def step_variables(model: keras.Model, batch: Any, refuses: bool = True) -> StepVariables:
    """Which variables `train_step` gives to optimizers.

    The step is traced, not run; code run by `run_eagerly` leaves the model unchanged.
    """
    capture = TensorFlowCapture(model, refuses=refuses)
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
    return StepVariables({index: update.optimizer for index, update in found.items()}, capture.given)


def _graph() -> Any:
    """The graph being traced; None if there is none."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
