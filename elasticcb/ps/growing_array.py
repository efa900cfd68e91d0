"""Arrays that grow without being copied."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import numpy.typing as npt

from elasticcb.rpc.tensors import Array


class GrowingArray:
    """An array of zeros whose first axis grows.

    It owns its memory pages. The system allocates them at the first write, and moves them by remapping when the array
    grows, so neither growth nor reserved capacity costs anything per row.

    Attributes:
        array: all reserved rows, [capacity, *row_shape]. Read it again after each `reserve`.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._row_shape, self._dtype = row_shape, np.dtype(dtype)
        self._row_bytes = max(1, math.prod(row_shape) * self._dtype.itemsize)
        self._pages = _pages(mmap.PAGESIZE)
        self.array = self._view()

    def reserve(self, rows: int) -> None:
        """Reserves at least `rows` rows."""
        if rows <= len(self.array):
            return
        size = len(self._pages)
        while size < rows * self._row_bytes:
            size *= 2
        held = self.array
        del self.array
        try:
            del held
            self._pages.resize(size)
        except (BufferError, OSError, SystemError, ValueError):
            # The array is still referenced, or the system can't remap pages.
            old, self._pages = self._pages, _pages(size)
            self._pages[: len(old)] = old[:]
        _use_large_pages(self._pages)
        self.array = self._view()

    def _view(self) -> Array:
        capacity = len(self._pages) // self._row_bytes
        array: Array = np.ndarray((capacity, *self._row_shape), self._dtype, self._pages)
        return array


def _pages(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _use_large_pages(pages: mmap.mmap) -> None:
    """Rows are accessed at random: with large pages the processor needs fewer address translations."""
    if hasattr(mmap, "MADV_HUGEPAGE") and len(pages) >= 4 << 20:
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
