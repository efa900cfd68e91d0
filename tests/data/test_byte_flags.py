"""Flags of bytes, counted and followed by words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticcb.data.text_index import count_before, odd_so_far


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_flags_are_counted_as_one_by_one(flags: list[bool]) -> None:
    array = np.array(flags)
    assert odd_so_far(array).tolist() == np.logical_xor.accumulate(array).tolist()
    assert count_before(array, np.arange(len(array))).tolist() == [sum(flags[:place]) for place in range(len(flags))]


@pytest.mark.parametrize("size", [63, 64, 65, 1 << 16, (1 << 19) + 7])
def test_all_flags_may_be_set(size: int) -> None:
    flags = np.ones(size, bool)
    assert count_before(flags, np.array([0, size - 1])).tolist() == [0, size - 1]
    assert odd_so_far(flags)[[0, 1, size - 1]].tolist() == [True, False, size % 2 == 1]
