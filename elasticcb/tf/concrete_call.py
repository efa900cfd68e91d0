"""Compiled functions that are called often, on little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def quick_call(
    function: Callable[..., Any], signature: Sequence[tf.TensorSpec], jit_compile: bool | None = None
) -> Callable[[Sequence[tf.Tensor]], Any]:
    """`function`, compiled for tensors of `signature`, as a function of a list of such tensors.

    A `tf.function` binds and checks its arguments anew at each call, for some 0.3 ms; here nothing is checked, and a
    call of a small function takes 0.1 ms.
    """
    compiled = tf.function(
        function, input_signature=list(signature), autograph=False, jit_compile=jit_compile
    ).get_concrete_function()
    captured = compiled.captured_inputs
    if hasattr(compiled, "_call_flat"):
        return lambda tensors: compiled._call_flat(list(tensors), captured)
    return lambda tensors: compiled(*tensors)
