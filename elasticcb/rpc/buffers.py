"""Reusable memory for received arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from elasticcb.rpc.tensors import Array, aligned

_MOST = 4  # maximum number of kept buffers
_SMALL = 64 << 10  # bytes; smaller buffers are cheaper to allocate than to keep


class Buffers:
    """Allocates memory, and reuses it once no array in it is in use: pages that were touched before are several times
    as fast as new ones. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: list[tuple[Array, Callable[[], Any]]] = []  # with a function that returns what is using it

    def take(self, size: int) -> Array:
        """uint8 `[size]`, aligned for TensorFlow. In use as long as it, or its `data`, is referenced.

        Raises `ValueError` or `MemoryError` for an impossible size.
        """
        if size <= _SMALL:
            return aligned((size,), np.uint8)
        free = [index for index, (_, lent) in enumerate(self._kept) if lent() is None]
        fitting = [index for index in free if self._kept[index][0].size >= size]
        if fitting:
            index = fitting[0]
        elif free or len(self._kept) < _MOST:
            index = free[0] if free else len(self._kept)
            # Some headroom: the number of embedding rows differs from batch to batch.
            made = aligned((size + size // 4,), np.uint8)
            self._kept[index : index + 1] = [(made, lambda: None)]
        else:
            return aligned((size,), np.uint8)
        memory = self._kept[index][0]
        given: Array = memory[:size]
        self._kept[index] = memory, weakref.ref(given)
        return given
