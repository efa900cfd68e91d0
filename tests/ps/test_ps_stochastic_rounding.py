from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from elasticcb.ps.table_rows import rounded

IDS = np.random.default_rng(1).integers(0, 2**62, 200)


def some_rows(dim=5, scale=1.0):
    return (np.random.default_rng(0).standard_normal((len(IDS), dim)) * scale).astype(np.float32)


def neighbours(rows):
    """The bfloat16 numbers on both sides of each, as float32."""
    low = (rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = (low.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    return low, high


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-39])  # the last of numbers that are not normal
def test_each_element_becomes_a_neighbour_and_the_mean_over_versions_is_the_element(scale):
    rows, versions = some_rows(scale=scale), 500
    low, high = neighbours(rows)
    total = np.zeros(rows.shape)
    for version in range(versions):
        found = rounded(rows, IDS, version).astype(np.float32)
        assert ((found == low) | (found == high)).all()
        total += found
    errors = (total / versions - rows) / (high.astype(np.float64) - low)
    # Of a number that is rounded up with the probability p, the variance is p (1 - p); over all p that is 1 / 6.
    assert abs(errors.mean()) < 5 * np.sqrt(1 / 6 / versions / errors.size)
    assert errors.std() == pytest.approx(np.sqrt(1 / 6 / versions), rel=0.1)


def test_noise_of_other_ids_versions_columns_and_values_is_other_noise():
    def ups(ids, version, rows):
        return rounded(rows, ids, version).astype(np.float32) > 1

    ones = np.full((4000, 8), 1 + 2**-8, np.float32)  # halfway between two neighbours
    ids = np.arange(len(ones))
    first = ups(ids, 1, ones)
    assert first.mean() == pytest.approx(0.5, abs=0.02)
    changed = ones.copy()
    changed[:, 3] += np.float32(2**-20)
    for other in (ups(ids, 2, ones), ups(ids + 1, 1, ones), ups(ids + 2**40, 1, ones), ups(ids, 1, changed)):
        assert (first == other).mean() == pytest.approx(0.5, abs=0.02)
    for column in range(1, 8):
        assert (first[:, 0] == first[:, column]).mean() == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 16, 17])
def test_row_is_rounded_alike_whichever_others_are_rounded_with_it(dim):
    rows = some_rows(dim)
    whole = rounded(rows, IDS, 7)
    order = np.random.default_rng(2).permutation(len(IDS))[:50]
    np.testing.assert_array_equal(rounded(rows[order], IDS[order], 7), whole[order])
    assert rounded(rows[:0], IDS[:0], 7).shape == (0, dim)


def test_what_bfloat16_holds_and_nan_and_infinity_stay():
    held = some_rows().astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded(held.astype(np.float32), IDS, 3), held)
    all_nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    special = np.array([*all_nans, np.inf, -np.inf, 0.0, -0.0], np.float32)
    for version in range(100):
        found = rounded(special[None], IDS[:1], version)[0].astype(np.float32)
        np.testing.assert_array_equal(found, special)
        np.testing.assert_array_equal(np.signbit(found[5:]), np.signbit(special[5:]))
