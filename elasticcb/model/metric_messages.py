"""Messages about tasks, with metric states and outputs of batches, between a worker and the master."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import from_message, to_message
from elasticcb.settings import Mode

# By type of a task with data; the proto and `Mode` use the same names.
MODES = {pb.TaskType.Value(mode.name): mode for mode in Mode}

# Values of `metric.variables`, by metric. Those of `OUTPUTS` are the packed inputs of all metrics, one array per batch.
States = dict[str, list[np.ndarray]]
PROGRESSIVE = "progressive/"  # before names of metrics, of batches that were evaluated before they are trained
OUTPUTS = "~outputs"

Outputs = dict[str, np.ndarray]  # of one batch: arrays by their paths in a structure


def to_metric_states(states: States) -> list[pb.MetricState]:
    """Metric states as messages."""
    return [
        pb.MetricState(name=name, variables=[to_message(np.asarray(value)) for value in values])
        for name, values in states.items()
    ]


def from_metric_states(messages: Sequence[pb.MetricState]) -> States:
    """The states by unit, from `to_metric_states`."""
    return {message.name: [from_message(variable) for variable in message.variables] for message in messages}


def with_outputs(states: States, outputs: Any) -> States:
    """The states after a training step, and its `(labels, predictions[, weight])`; these may be empty."""
    if not outputs:
        return states
    (message,) = to_outputs([flatten_outputs(outputs)])
    return {**states, OUTPUTS: [np.frombuffer(message.SerializeToString(), np.uint8)]}


def outputs_in(states: Mapping[str, Sequence[np.ndarray]]) -> list[Any]:
    """What `with_outputs` has added, by batch."""
    packed = [pb.BatchOutputs.FromString(np.asarray(array).tobytes()) for array in states.get(OUTPUTS, ())]
    return [unflatten_outputs(outputs) for outputs in from_outputs(packed)]


def to_outputs(batches: Sequence[Outputs]) -> list[pb.BatchOutputs]:
    """Outputs of steps, one message per batch."""
    return [pb.BatchOutputs(arrays=[to_message(array, path) for path, array in outputs.items()]) for outputs in batches]


def from_outputs(messages: Sequence[pb.BatchOutputs]) -> list[Outputs]:
    """Outputs of steps, by batch, from `to_outputs`."""
    return [{tensor.name: from_message(tensor) for tensor in message.arrays} for message in messages]


def flatten_outputs(structure: Any) -> Outputs:
    """Flattens a structure of arrays and tensors to arrays by path; a ragged or sparse tensor becomes several
    arrays."""
    return dict(_flatten(structure))


def unflatten_outputs(outputs: Mapping[str, np.ndarray]) -> Any:
    """Inverse of `flatten_outputs`, with tuples for lists; dense leaves are NumPy arrays."""
    if set(outputs) == {""}:
        return outputs[""]
    parts: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for path, array in outputs.items():
        kind, rest = path[0], path[1:]
        key, _, below = rest.partition(_END)
        parts.setdefault((kind, key), {})[below] = array
    if all(kind == _COMPOSITE for kind, _ in parts):
        return _composite({key: part[""] for (_, key), part in parts.items()})
    if all(kind == "[" for kind, _ in parts):
        return tuple(unflatten_outputs(part) for part in parts.values())
    return {key: unflatten_outputs(part) for (_, key), part in parts.items()}


_END = "\x1f"  # ends a step of a path; names of outputs contain no unit separator
_COMPOSITE = "~"  # starts a step into the arrays of a ragged or sparse tensor, or marks None


def _flatten(structure: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(structure, Mapping):
        for key, value in structure.items():
            yield from _flatten(value, f"{path}.{key}{_END}")
    elif isinstance(structure, (tuple, list)):
        for index, value in enumerate(structure):
            yield from _flatten(value, f"{path}[{index}{_END}")
    elif structure is None:
        yield f"{path}{_COMPOSITE}none{_END}", np.zeros(0)
    elif hasattr(structure, "nested_row_splits"):  # a tf.RaggedTensor
        yield f"{path}{_COMPOSITE}values{_END}", structure.flat_values.numpy()
        for depth, splits in enumerate(structure.nested_row_splits):
            yield f"{path}{_COMPOSITE}{depth}{_END}", splits.numpy()
    elif hasattr(structure, "dense_shape"):  # a tf.SparseTensor
        for name in ("indices", "values", "dense_shape"):
            yield f"{path}{_COMPOSITE}{name}{_END}", getattr(structure, name).numpy()
    else:
        yield path, np.asarray(structure)


def _composite(arrays: Mapping[str, np.ndarray]) -> Any:
    """None, or the ragged or sparse tensor of these arrays."""
    if "none" in arrays:
        return None
    import tensorflow as tf  # not at the top: the master answers calls before TensorFlow is imported

    if "dense_shape" in arrays:
        return tf.SparseTensor(arrays["indices"], arrays["values"], arrays["dense_shape"])
    splits = [arrays[str(depth)] for depth in range(len(arrays) - 1)]
    return tf.RaggedTensor.from_nested_row_splits(arrays["values"], splits, validate=False)
