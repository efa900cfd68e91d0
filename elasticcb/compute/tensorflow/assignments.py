"""Finds assignments in a traced step, besides those by its optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from elasticcb.compute.refusals import assignment
from elasticcb.keras_private import value_of

ASSIGN = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")  # prefixes of the ops' names


@contextlib.contextmanager
def refused_assignments(trainable: Iterable[Any]) -> Iterator[None]:
    """Refuses a step, traced inside the context, that assigns to variables that servers update with gradients.

    The assigned value would be lost: servers compute the weights after a step from the weights before it.

    Raises:
        ModelFileError: it assigns to one of them.
    """
    graph = tf.compat.v1.get_default_graph()
    before = 0 if tf.executing_eagerly() else len(graph.get_operations())
    yield
    if tf.executing_eagerly():
        return
    paths = {id(value_of(variable).handle): variable.path for variable in trainable}
    inside = {id(own): paths[id(outer)] for outer, own in graph.captures if id(outer) in paths}
    for operation in graph.get_operations()[before:]:
        path = inside.get(id(operation.inputs[0])) if operation.type.startswith(ASSIGN) else None
        if path is not None:
            raise assignment(path)
