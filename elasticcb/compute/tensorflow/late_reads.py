"""Finds what a model's step reads of variables after an optimizer was given their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_callbacks  # no public name tells of each operation that runs

from elasticcb.compute.refusals import late_read

# Of those that take a variable: what tells nothing of its value. compute/tensorflow/assignments.py has what assigns.
_NO_READS = ("VariableShape", "VarIsInitializedOp", "Assign", "ResourceScatter", "ResourceStridedSliceAssign")
# Back through a loop or a condition, TensorFlow hands over variables of which only the shapes are wanted.
_BACKWARDS, _CALLS = "gradient_tape/", ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")


class LateReads:
    """Watches one step from the first gradients on that it gives to an optimizer.

    Servers apply gradients after the step, so what it reads later in it are values from before the update.
    """

    def __init__(self) -> None:
        self._given: list[tuple[Any, str, str, int]] = []  # (handle, variable, optimizer, operations before it)
        self._found: list[tuple[str, str]] = []  # (variable, optimizer) of reads that have run
        self._running = contextlib.ExitStack()

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """A step, traced or run in the context, that reads such a variable is an error.

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
        """The optimizer of that name was given gradients of these: Keras's variables, or tf.Variables."""
        eager = tf.executing_eagerly()
        if eager and not self._given:
            op_callbacks.add_op_callback(self._note)
            self._running.callback(op_callbacks.remove_op_callback, self._note)
        before = 0 if eager else len(tf.compat.v1.get_default_graph().get_operations())
        for variable in variables:
            inner = getattr(variable, "_value", variable)
            path = str(getattr(variable, "path", None) or variable.name)
            self._given.append((inner.handle, path, optimizer, before))

    def _note(
        self, kind: Any, inputs: Sequence[Any], attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        """Called by TensorFlow after each operation that has run."""
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
