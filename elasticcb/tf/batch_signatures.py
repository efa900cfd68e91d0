"""Compiled functions with a low call overhead: one traced function for all batches that differ only in size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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


try:
    from tensorflow.python.eager.context import function_executor_type
except ImportError:  # not a public name
    function_executor_type = None

_Call = Callable[[Sequence[tf.Tensor]], Any]

_CALLS_BEFORE_COMPILING = 10


def quick_call(
    function: Callable[..., Any],
    signature: Sequence[tf.TensorSpec],
    jit_compile: bool | None = None,
    autograph: bool = False,
) -> QuickCall:
    """Compiles `function` for tensors of `signature`; returns a function of a list of such tensors.

    A `tf.function` binds and checks its arguments at each call, which takes 0.3 ms; here nothing is checked, and a call
    of a small function takes 0.1 ms.
    """
    compiled = tf.function(
        function, input_signature=list(signature), autograph=autograph, jit_compile=jit_compile
    ).get_concrete_function()
    return QuickCall(unchecked(compiled), compiled.structured_outputs)


def unchecked(compiled: Any) -> _Call:
    """A function of the flat inputs of a concrete function, with what it captures now."""
    if not hasattr(compiled, "_inference_function"):  # not a public name
        return lambda tensors: compiled(*tensors)
    captured, pack = compiled.captured_inputs, _packer(compiled.structured_outputs)
    return lambda tensors: pack(iter(compiled._inference_function.call_flat(*tensors, *captured) or ()))


class CompiledLater:
    """A function that is compiled once it has been called some times.

    Compiling takes as long as hundreds of calls of a small function, and a short job makes a few.

    Args:
        function: as for `quick_call`; gives the same result when it is not compiled.
        signature: as for `quick_call`.
    """

    def __init__(self, function: Callable[..., Any], signature: Sequence[tf.TensorSpec] = ()) -> None:
        self._function, self._signature = function, signature
        self._calls = 0
        self._compiled: _Call | None = None

    def __call__(self, tensors: Sequence[tf.Tensor] = ()) -> Any:
        self._calls += 1
        if self._calls <= _CALLS_BEFORE_COMPILING:
            return self._function(*tensors)
        if self._compiled is None:
            self._compiled = quick_call(self._function, self._signature)
        return self._compiled(tensors)


def _packer(structure: Any) -> Callable[[Iterator[tf.Tensor]], Any]:
    """A function that builds `structure` from its flat tensors, in their order.

    TensorFlow's own function walks through the structure at each call, which takes 0.1 ms for the result of a step.
    """
    if isinstance(structure, tf.Tensor):
        return next
    if type(structure) is dict:
        keys = tuple(structure)
        values = [(key, _packer(structure[key])) for key in sorted(keys)]  # the order in which TensorFlow flattens

        def pack_dict(given: Iterator[tf.Tensor]) -> Any:
            found = {key: pack(given) for key, pack in values}
            return {key: found[key] for key in keys}

        return pack_dict
    if type(structure) in (list, tuple):
        kind, items = type(structure), [_packer(item) for item in structure]
        return lambda given: kind(pack(given) for pack in items)
    parts = tf.nest.flatten(structure, expand_composites=True)

    def pack_any(given: Iterator[tf.Tensor]) -> Any:
        flat = [None if part is None else next(given) for part in parts]
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

    return pack_any


# Start of the error that is raised before any operation has run.
_REFUSED = "Single-threaded executor does not support"


class QuickCall:
    """Runs the operations of a function in one thread, if possible.

    Passing small operations between threads costs more than it gains. Single operations may still use several threads.

    Attributes:
        outputs: the symbolic results.
    """

    def __init__(self, function: _Call, outputs: Any) -> None:
        self._function, self.outputs = function, outputs
        self._is_possible = function_executor_type is not None

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if self._is_possible:
            try:
                with function_executor_type("SINGLE_THREADED_EXECUTOR"):
                    return self._function(tensors)
            except tf.errors.OpError as error:
                if _REFUSED not in error.message:
                    raise
                self._is_possible = False
        return self._function(tensors)
