"""Finds variables that a model's step reads after their gradients were given to an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_callbacks  # there is no public API to observe each operation

from elasticcb.compute.capture import path_of
from elasticcb.compute.refusals import late_read
from elasticcb.compute.tensorflow.assignments import ASSIGN

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
