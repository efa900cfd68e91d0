"""The part of a step's graph that leads to the looked-up ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute import served_tables
from elasticcb.keras_private import embeddings_of, value_of
from elasticcb.layers.table_layers import TableLayer
from elasticcb.optimizers.traits import model_optimizers

_ASSIGN = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")  # prefixes of the operations' names
# Stateful for TensorFlow, but with the same result at every run: they only read, or check.
_HARMLESS = {
    "Assert", "LookupTableFindV2", "LookupTableSizeV2", "PartitionedCall", "ReadVariableOp", "ResourceGather",
    "VarHandleOp", "VariableShape",
}  # fmt: skip


class Recording:
    """Records the layers' lookups while a step is traced, and returns placeholder rows."""

    def __init__(self, layers: Mapping[int, TableLayer]) -> None:
        self._layers = layers
        self._graph = tf.compat.v1.get_default_graph()
        self._asked: dict[int, list[tf.Tensor]] = {}
        self._answers: set[Any] = set()  # operations
        self._problems: dict[int, str] = {}

    def lookup(self, index: int, ids: tf.Tensor) -> tf.Tensor:
        """A placeholder for the rows of `ids`, through which the tape reaches the layer's variable."""
        layer = self._layers[index]
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._problems.setdefault(index, served_tables.IN_A_LOOP)
        before = len(graph.get_operations())
        rows = tf.gather(value_of(embeddings_of(layer)), tf.zeros_like(ids))
        self._answers.update(graph.get_operations()[before:])
        self._asked.setdefault(index, []).append(tf.cast(ids, tf.int64))
        return rows

    def calls(self) -> dict[int, int]:
        """How often each table is looked up."""
        return {index: len(asked) for index, asked in self._asked.items()}

    def problems(self) -> dict[int, str]:
        """Why rows can't be determined beforehand, by table."""
        return dict(self._problems)

    def find_problems(self, model: keras.Model) -> None:
        """Finds ids that depend on the step's computation, and other uses of the variables."""
        inner = {id(own): outer for outer, own in self._graph.captures}
        weights = {id(value_of(variable).handle): variable for variable in model.weights}
        for index, layer in self._layers.items():
            if index not in self._problems and self._has_other_uses(layer):
                self._problems[index] = served_tables.OTHER_USES
        for index, asked in self._asked.items():
            if index not in self._problems:
                problem = self._problem_of_ids(asked, inner, weights)
                if problem:
                    self._problems[index] = problem

    def _has_other_uses(self, layer: TableLayer) -> bool:
        handle = id(value_of(embeddings_of(layer)).handle)
        return any(
            consumer not in self._answers and consumer.type != "VariableShape"
            for outer, own in self._graph.captures
            if id(outer) == handle
            for consumer in own.consumers()
        )

    def _problem_of_ids(self, ids: Sequence[tf.Tensor], inner: Mapping[int, Any], weights: Mapping[int, Any]) -> str:
        for operation in _ancestors(ids):
            if operation in self._answers:
                return served_tables.BY_ROWS
            if operation.type == "Placeholder" and operation.outputs:
                own = operation.outputs[0]
                variable = weights.get(id(inner.get(id(own))))
                if variable is not None and variable.trainable:
                    return served_tables.by_weights(variable.path)
                if any(consumer.type.startswith(_ASSIGN) for consumer in own.consumers()):
                    name = getattr(variable, "path", "a variable, as the seed of random numbers")
                    return served_tables.by_changed(name)
            elif operation.op_def is not None and operation.op_def.is_stateful and operation.type not in _HARMLESS:
                return (
                    f"its ids depend on the operation {operation.type}, which may give other values when the step "
                    "runs. Compute ids only from the features, without randomness and Python functions "
                    "(tf.numpy_function has stateful=False); or compute them in the input pipeline."
                )
        return ""

    def outputs(self) -> list[tf.Tensor]:
        """By table, in order, whether an id is out of range (bool [tables]); for each table its unique ids (int64 [n]),
        and for each of its calls the positions of the ids among them (int32, of the ids' shape)."""
        bad, result = [], []
        numbers: dict[Any, int] = {}
        made: dict[Any, list[tf.Tensor]] = {}  # shared by tables with the same ids
        for index in sorted(self._asked):
            asked, limit = self._asked[index], self._layers[index].input_dim
            key = tuple(_number(ids, numbers) for ids in asked)
            if key not in made:
                made[key] = _unique_ids(asked)
            unique = made[key][0]
            bad.append(tf.reduce_any(unique < 0 if limit is None else (unique < 0) | (unique >= limit)))
            result += made[key]
        return [tf.stack(bad) if bad else tf.zeros([0], tf.bool), *result]


def _unique_ids(asked: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    flat = [tf.reshape(ids, [-1]) for ids in asked]
    unique, positions = tf.unique(tf.concat(flat, 0) if len(flat) > 1 else flat[0])
    parts = tf.split(positions, [tf.size(ids) for ids in flat]) if len(flat) > 1 else [positions]
    return [unique, *(tf.reshape(part, tf.shape(ids)) for part, ids in zip(parts, asked, strict=True))]


def _number(tensor: tf.Tensor, numbers: dict[Any, int]) -> tuple[int, int]:
    """Numbers a tensor of a graph: tensors with the same number have the same values.

    Args:
        numbers: those given so far, of operations, and of keys that identify equal operations.
    """
    pending = [tensor.op]
    while pending:
        operation = pending[-1]
        missing = [before.op for before in operation.inputs if before.op not in numbers]
        if missing:
            pending += missing
            continue
        pending.pop()
        if operation in numbers:
            continue
        kind: Any = operation
        if operation.type != "Placeholder" and not operation.control_inputs and not operation.op_def.is_stateful:
            attributes = operation.node_def.attr
            given = tuple((numbers[before.op], before.value_index) for before in operation.inputs)
            kind = (operation.type, tuple((k, str(attributes[k])) for k in sorted(attributes)), given)
        numbers[operation] = numbers.setdefault(kind, len(numbers))
    return numbers[tensor.op], tensor.value_index


def id_function(
    model: keras.Model, recorded: Callable[[Any], Recording], specs: Any
) -> tuple[Callable[[Sequence[tf.Tensor]], list[tf.Tensor]], Recording]:
    """A function from the leaves of a batch to `Recording.outputs`, if there are no problems."""
    recording: Recording
    outputs: list[tf.Tensor] = []

    parts = tf.nest.flatten(specs, expand_composites=True)
    signature = [tf.TensorSpec(spec.shape, spec.dtype) for spec in parts if spec is not None]

    def traced(*given: tf.Tensor) -> list[tf.Tensor]:
        nonlocal recording
        leaves = iter(given)
        flat = [None if spec is None else next(leaves) for spec in parts]
        recording = recorded(tf.nest.pack_sequence_as(specs, flat, expand_composites=True))
        recording.find_problems(model)
        if not recording.problems():
            outputs.extend(recording.outputs())
        return outputs

    with _without_updates(model):
        # Without automatic control dependencies, which would make ids wait for everything before them.
        whole = tf.compat.v1.wrap_function(traced, signature)
    if recording.problems():
        return lambda leaves: [], recording
    different = list(dict.fromkeys(map(id, outputs)))
    places = [different.index(id(output)) for output in outputs]
    needed = set(_ancestors(outputs))
    feeds = [place for place in range(len(signature)) if whole.inputs[place].op in needed]
    by_id = {id(output): output for output in outputs}
    part = whole.prune([whole.inputs[place] for place in feeds], [by_id[key] for key in different])

    def function(leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # Calling `part` compares arguments with a signature, which takes as long as everything else.
        found = part._call_flat([leaves[place] for place in feeds], part.captured_inputs)
        return [found[place] for place in places]

    return function, recording


@contextlib.contextmanager
def _without_updates(model: keras.Model) -> Iterator[None]:
    """Optimizers do nothing, except those that are being captured."""
    silent = [optimizer for optimizer in model_optimizers(model) if "apply" not in vars(optimizer)]
    for optimizer in silent:
        vars(optimizer)["apply"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for optimizer in silent:
            del vars(optimizer)["apply"]


def _ancestors(tensors: Sequence[tf.Tensor]) -> list[Any]:
    """The operations on which these tensors depend."""
    pending = [tensor.op for tensor in tensors]
    seen: dict[Any, None] = dict.fromkeys(pending)
    while pending:
        operation = pending.pop()
        for before in (*(tensor.op for tensor in operation.inputs), *operation.control_inputs):
            if before not in seen:
                seen[before] = None
                pending.append(before)
    return list(seen)
