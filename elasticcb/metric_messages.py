"""Metric states on the wire, between a worker and the master. Knows no Keras."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.tensors import from_message, to_message

States = dict[str, list[np.ndarray]]  # by metric: the values of `metric.variables`


def to_metric_states(states: States, outputs: Sequence[Any]) -> list[pb.MetricState]:
    """Metric states, and the outputs that some metrics need instead, as messages.

    `outputs` are `(labels, predictions[, sample_weight])`, one per batch. They travel as arrays over all
    batches, each named by its path in that structure.
    """
    messages = [
        pb.MetricState(name=name, variables=[to_message(np.asarray(value)) for value in values])
        for name, values in states.items()
    ]
    if outputs:
        messages.append(pb.MetricState(outputs=to_outputs(outputs)))
    return messages


def to_outputs(outputs: Sequence[Any]) -> list[pb.Tensor]:
    """Structures of arrays, one per batch, as arrays over all batches, each named by its path in the structure."""
    leaves = [dict(_flatten(batch)) for batch in outputs]
    joined = {path: np.concatenate([batch[path] for batch in leaves]) for path in leaves[0]} if leaves else {}
    return [to_message(array, path) for path, array in joined.items()]


def from_outputs(messages: Sequence[pb.Tensor]) -> dict[str, np.ndarray]:
    """The arrays by path, from `to_outputs`."""
    return {tensor.name: from_message(tensor) for tensor in messages}


def from_metric_states(messages: Sequence[pb.MetricState]) -> tuple[States, dict[str, np.ndarray]]:
    """The states by unit and the outputs by path, from `to_metric_states`."""
    states = {m.name: [from_message(variable) for variable in m.variables] for m in messages if not m.outputs}
    return states, from_outputs([tensor for m in messages for tensor in m.outputs])


def unflatten_outputs(outputs: Mapping[str, np.ndarray]) -> Any:
    """The structure of outputs whose arrays are named by their paths: "[0]", "[1].score"."""
    if set(outputs) == {""}:
        return outputs[""]
    parts: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for path, array in outputs.items():
        kind, rest = path[0], path[1:]
        key, _, below = rest.partition(_END)
        parts.setdefault((kind, key), {})[below] = array
    if all(kind == "[" for kind, _ in parts):
        return tuple(unflatten_outputs(part) for part in parts.values())
    return {key: unflatten_outputs(part) for (_, key), part in parts.items()}


_END = "\x1f"  # ends a step of a path; no name of an output holds a unit separator


def _flatten(structure: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(structure, Mapping):
        for key, value in structure.items():
            yield from _flatten(value, f"{path}.{key}{_END}")
    elif isinstance(structure, (tuple, list)):
        for index, value in enumerate(structure):
            yield from _flatten(value, f"{path}[{index}{_END}")
    else:
        yield path, np.asarray(structure)
