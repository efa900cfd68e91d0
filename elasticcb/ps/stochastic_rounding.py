"""float32 rounded to bfloat16 at random, so that what is too small to round up is not lost.

To the nearest, a row near 1 takes no update below 0.4 % of it, however often one comes. Rounded up with the probability
of the part that is cut off, it takes all of them on average (Gupta et al. 2015, "Deep Learning with Limited Numerical
Precision"; Zamirai et al. 2020, "Revisiting BFloat16 Training").

The bits that are added before the cut are a function of the row's id and new values and of the model's version. So a
server that makes the changes of a lost one again comes to the same rows, whichever others are updated with them.
Several updates of a row within one version differ by its values.
"""

from __future__ import annotations

import functools

import numpy as np

from elasticcb.rpc.tensors import Array, all_finite, dtype_of

# Of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014), of whose two rounds
# one mixes what a row is known by, and one the words of the row.
_GOLDEN, _MULTIPLIER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_OF_VERSION = 0x94D049BB133111EB
_CUT = 16  # bits


def rounded(rows: Array, ids: Array, version: int) -> Array:
    """`rows` (float32 [n, dim]) as bfloat16: each element one of its two neighbours, or what it is.

    Args:
        ids: int64 [n].
        version: of the model.
    """
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    noise = _noise(ids, version, bits)
    noise += bits
    noise >>= np.uint32(_CUT)
    result: Array = noise.astype(np.uint16).view(dtype_of("bfloat16"))
    if not all_finite(rows):  # infinity stays by itself, and NaN with bits at the end would become another number
        unknown = np.isnan(rows)
        result[unknown] = np.nan
    return result


def _noise(ids: Array, version: int, bits: Array) -> Array:
    """Numbers below 2^16, uint32 [n, dim]."""
    seeds = ids.astype(np.uint64) * _GOLDEN
    seeds += np.uint64(version * _OF_VERSION % 2**64)
    seeds ^= np.einsum("ij->i", bits).astype(np.uint64) << np.uint64(32)
    seeds = _mixed(seeds)
    words = _mixed(seeds[:, None] * _columns(bits.shape[1]))
    return words.view(np.uint16)[:, : bits.shape[1]].astype(np.uint32)


@functools.cache
def _columns(dim: int) -> Array:
    """An odd number for each 64 bits of a row's noise, uint64 [n]."""
    return np.arange(1, -(-_CUT * dim // 64) + 1, dtype=np.uint64) * _GOLDEN | np.uint64(1)


def _mixed(words: Array) -> Array:
    """One round, of uint64, which are overwritten."""
    words ^= words >> np.uint64(32)
    words *= _MULTIPLIER
    words ^= words >> np.uint64(29)
    return words
