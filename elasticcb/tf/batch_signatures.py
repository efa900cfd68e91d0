"""Kinds of batches: one traced function for all batches that differ only in size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

Function = TypeVar("Function")
Key = tuple[Any, ...]
Fixed = Sequence[bool]


def flat_tensors(batch: Any, fixed: Fixed = ()) -> tuple[list[Any], Key]:
    """The tensors of a batch, with composite ones expanded, and a key for batches that need the same function.

    None values in a batch are skipped.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        leaves = [tf.convert_to_tensor(leaf) for leaf in leaves]
    # `shape` would create an object per dimension.
    shapes = [leaf._shape_tuple() for leaf in leaves]
    sizes = [(leaf.dtype, len(shape), shape[1:]) for leaf, shape in zip(leaves, shapes, strict=True)]
    rows = [each.shape[0] for each, own in zip(tf.nest.flatten(batch), fixed, strict=False) if own and len(each.shape)]
    return leaves, ((_structure(batch), *rows), *sizes)


def _structure(value: Any) -> Any:
    if isinstance(value, tf.Tensor):
        return 0
    if isinstance(value, Mapping):
        return tuple((key, _structure(item)) for key, item in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_structure, value))
    return type(value)


class Signatures(Generic[Function]):
    """Functions by kind of batch.

    The first function for a structure is traced for the shapes of its batch, with a free batch dimension where it is
    not fixed. For other shapes, a function is traced in which all dimensions that have changed are free.
    """

    def __init__(self, make: Callable[[Any], Function]) -> None:
        self._make = make
        self._functions: dict[Key, Function] = {}
        self._specs: dict[Key, Any] = {}

    def function(self, batch: Any, key: Key, fixed: Fixed = ()) -> Function:
        """The function for `batch`, whose `flat_tensors` gave `key`."""
        function = self._functions.get(key)
        return self._made(batch, key, fixed) if function is None else function

    def _made(self, batch: Any, key: Key, fixed: Fixed) -> Function:
        kind = (key[0][0], *((dtype, rank) for dtype, rank, _ in key[1:]))
        exact = specs_of(batch, fixed)
        known = self._specs.get(kind)
        merged = exact if known is None else tf.nest.map_structure(_merged, known[0], exact)
        if known is not None and merged == known[0]:
            function = known[1]
        else:
            function = self._make(merged)
            self._specs[kind] = (merged, function)
        self._functions[key] = function
        return function


def specs_of(batch: Any, fixed: Fixed = ()) -> Any:
    """The specs of a batch, with a free batch dimension.

    Args:
        fixed: for the first tensors of the batch, in the order of `tf.nest.flatten`, whether that dimension is fixed.
    """
    flags = itertools.chain(fixed, itertools.repeat(False))
    return tf.nest.map_structure(lambda leaf: _spec(leaf, next(flags)), batch)


def _spec(leaf: Any, is_fixed: bool) -> Any:
    if leaf is None:
        return None
    composite = isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    spec = tf.type_spec_from_value(leaf if composite else tf.convert_to_tensor(leaf))
    return spec if is_fixed or not spec.shape.rank else _with_shape(spec, [None, *spec.shape[1:]])


def _merged(one: Any, other: Any) -> Any:
    if one is None:
        return None
    sizes = [a if a == b else None for a, b in zip(one.shape, other.shape, strict=True)]
    return _with_shape(one, sizes)


def _with_shape(spec: Any, shape: Any) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype, spec.flat_values_spec)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype)
