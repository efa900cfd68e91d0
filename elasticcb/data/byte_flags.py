"""Counts and combines flags of the bytes of a block, 16 or 64 at once, as bits of a word."""

from __future__ import annotations

from typing import Any

import numpy as np

_BITS_SET = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)  # by the value of 16 bits


def odd_so_far(flags: Any) -> Any:
    """Whether the number of set `flags` up to and including each position is odd: bool of shape (n,), like `flags`.

    Same as `np.logical_xor.accumulate`, which is slower because it handles one flag at a time.
    """
    words = _words(flags)
    for shift in (1, 2, 4, 8, 16, 32):
        words ^= words << np.uint64(shift)
    odd = words >> np.uint64(63)  # in each word
    # all bits, if the number of set bits in earlier words is odd
    words ^= np.uint64(0) - (np.bitwise_xor.accumulate(odd) ^ odd)
    return np.unpackbits(words.view(np.uint8), count=len(flags), bitorder="little").view(bool)


def count_before(flags: Any, places: Any) -> Any:
    """How many of `flags`, bool of shape (n,), are set before each of `places`: int64, shape as `places`."""
    cells = _words(flags).view("<u2")
    before = np.zeros(len(cells) + 1, np.int64)
    np.cumsum(_BITS_SET.take(cells), out=before[1:])
    cell = places >> 4
    within: Any = _BITS_SET.take(cells[cell] & ((1 << (places & 15)) - 1))
    return before[cell] + within


def _words(flags: Any) -> Any:
    words = np.zeros(-(-len(flags) // 64), "<u8")
    packed = np.packbits(flags, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words
