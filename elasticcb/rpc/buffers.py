"""Memory that arrays are received into, again and again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from elasticcb.rpc.tensors import Array, aligned

_MOST = 4  # that are kept
_SMALL = 64 << 10  # bytes that cost less to ask the system for than to keep


class Buffers:
    """Gives memory, and gives it again once no array in it is in use any more: pages that were touched before are
    several times as fast as new ones. For one thread at a time."""

    def __init__(self) -> None:
        self._kept: list[tuple[Array, Callable[[], Any]]] = []  # and what in it is in use

    def take(self, size: int) -> Array:
        """uint8 `[size]`, aligned for TensorFlow. It is in use as long as it, or its `data`, is.

        Raises `ValueError` or `MemoryError` for more than there can be.
        """
        if size <= _SMALL:
            return aligned((size,), np.uint8)
        free = [index for index, (_, lent) in enumerate(self._kept) if lent() is None]
        fitting = [index for index in free if self._kept[index][0].size >= size]
        if fitting:
            index = fitting[0]
        elif free or len(self._kept) < _MOST:
            index = free[0] if free else len(self._kept)
            # Some room: how many rows of embedding tables travel differs from batch to batch.
            made = aligned((size + size // 4,), np.uint8)
            self._kept[index : index + 1] = [(made, lambda: None)]
        else:
            return aligned((size,), np.uint8)
        memory = self._kept[index][0]
        given: Array = memory[:size]
        self._kept[index] = memory, weakref.ref(given)
        return given
