"""A step of the model as a compiled function whose calls cost little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from elasticcb.layers.batch_signatures import Signatures, flat_tensors
from elasticcb.quick_call import quick_call

try:
    from tensorflow.python.eager.context import function_executor_type
except ImportError:  # it is no public name
    function_executor_type = None


class CompiledStep:
    """A function of a batch and of structures of tensors, traced once per kind of batch.

    A `tf.function` compares the shapes of all inputs with those of every call before, which takes longer than a small
    step when these are always others: each batch has another number of rows.

    Args:
        step: takes the batch, then what `call` is given.
        jit_compile: as in `tf.function`.
    """

    def __init__(self, step: Callable[..., Any], jit_compile: bool | None = None) -> None:
        self._step = step
        self._jit_compile = jit_compile
        self._signatures: Signatures[Callable[[Sequence[Any]], Any]] = Signatures(self._trace)
        self._others: Any = ()  # of the call that is traced
        # Operations run one after another in the thread that calls: threads that hand each other small ones cost more
        # than they bring. Within an operation there may be several threads.
        self._inline = function_executor_type is not None
        self._has_run = False

    def __call__(self, batch: Any, *others: Any) -> Any:
        leaves, key = flat_tensors(batch)
        self._others = others
        function = self._signatures.function(batch, key)
        self._others = ()  # whose memory is wanted for others
        inputs = [*leaves, *tf.nest.flatten(others)]
        if self._inline:
            try:
                with function_executor_type("SINGLE_THREADED_EXECUTOR"):
                    result = function(inputs)
                self._has_run = True
                return result
            except tf.errors.OpError:
                if self._has_run:
                    raise
                self._inline = False  # there are ops that such an executor does not know
        return function(inputs)

    def _trace(self, specs: Any) -> Callable[[Sequence[Any]], Any]:
        others = self._others
        signature = [tf.TensorSpec(s.shape, s.dtype) for s in tf.nest.flatten(specs, expand_composites=True) if s]
        count = len(signature)

        def step(*flat: Any) -> Any:
            given = iter(flat[:count])
            leaves = [None if s is None else next(given) for s in tf.nest.flatten(specs, expand_composites=True)]
            batch = tf.nest.pack_sequence_as(specs, leaves, expand_composites=True)
            return self._step(batch, *tf.nest.pack_sequence_as(others, list(flat[count:])))

        signature += [_of_any_rows(tensor) for tensor in tf.nest.flatten(others)]
        return quick_call(step, signature, self._jit_compile)


def _of_any_rows(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape, tensor.dtype)
