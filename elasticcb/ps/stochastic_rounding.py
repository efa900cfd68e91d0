"""Stochastic rounding of float32 to bfloat16, so that small updates are not lost.

With rounding to nearest, a row near 1 ignores updates below 0.4 % of it, however often they come. Rounding up with the
probability of the truncated part preserves them on average (Gupta et al. 2015, "Deep Learning with Limited Numerical
Precision"; Zamirai et al. 2020, "Revisiting BFloat16 Training").

The random bits are a function of the row's id and new values and of the model's version. So a server that replays the
changes of a lost one gets the same rows, whichever other rows are updated with them. Several updates of a row within
one version differ by its values.
"""

from __future__ import annotations

import functools

import numpy as np

from elasticcb.rpc.tensors import Array, all_finite, dtype_of

# From SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014): one of its two
# rounds mixes the row's identity, the other the words of the row.
_GOLDEN, _MULTIPLIER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_OF_VERSION = 0x94D049BB133111EB
_CUT = 16  # bits


def rounded(rows: Array, ids: Array, version: int) -> Array:
    """`rows` (float32 [n, dim]) as bfloat16: each element becomes one of its two neighbours, or itself."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    noise = _noise(ids, version, bits)
    noise += bits
    noise >>= np.uint32(_CUT)
    result: Array = noise.astype(np.uint16).view(dtype_of("bfloat16"))
    if not all_finite(rows):  # infinity must stay unchanged, and NaN with low bits must not become another number
        unknown = np.isnan(rows)
        result[unknown] = np.nan
    return result


def _noise(ids: Array, version: int, bits: Array) -> Array:
    """Random numbers below 2^16, uint32 [n, dim]."""
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
    """One mixing round on uint64, in place."""
    words ^= words >> np.uint64(32)
    words *= _MULTIPLIER
    words ^= words >> np.uint64(29)
    return words
