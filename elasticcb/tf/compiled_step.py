"""A step of the model as a compiled function with a low call overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from elasticcb.tf.batch_signatures import Fixed, Signatures, flat_tensors
from elasticcb.tf.concrete_call import quick_call

_Call = Callable[[Sequence[Any]], Any]


class CompiledStep:
    """A function of a batch and of structures of tensors, traced once per kind of batch.

    A `tf.function` compares the shapes of all inputs with those of every earlier call. That takes longer than a small
    step if shapes always differ, as with batches that use different numbers of rows.

    Args:
        fixed: which tensors of the batch have a fixed number of rows, as in `specs_of`; called for each batch.
    """

    def __init__(
        self, step: Callable[..., Any], jit_compile: bool | None = None, fixed: Callable[[], Fixed] = tuple
    ) -> None:
        self._step, self._fixed = step, fixed
        self._jit_compile = jit_compile
        self._signatures: Signatures[_Call] = Signatures(self._trace)

    def __call__(self, *args: Any) -> Any:
        """The step of `args`: the batch, and structures of tensors."""
        fixed = self._fixed()
        leaves, key = flat_tensors(args, fixed)
        return self._signatures.function(args, key, fixed)(leaves)

    def _trace(self, specs: Any) -> _Call:
        flat_specs = tf.nest.flatten(specs, expand_composites=True)

        def step(*leaves: Any) -> Any:
            given = iter(leaves)
            flat = [None if spec is None else next(given) for spec in flat_specs]
            return self._step(*tf.nest.pack_sequence_as(specs, flat, expand_composites=True))

        signature = [tf.TensorSpec(spec.shape, spec.dtype) for spec in flat_specs if spec is not None]
        return quick_call(step, signature, self._jit_compile)
