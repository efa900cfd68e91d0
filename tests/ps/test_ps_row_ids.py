from __future__ import annotations

import numpy as np
import pytest

from elasticcb.errors import WireError
from elasticcb.ps.push_reader import check_row_ids


@pytest.mark.parametrize(
    ("ids", "below", "message"),
    [
        (np.array([3, -1]), None, "Row id -1 of 'emb' is out of range: expected ids from 0."),
        (np.array([0, 7]), 7, "Row id 7 of 'emb' is out of range: expected ids from 0, below 7."),
        (np.array([5, 2, 5]), None, "Row id 5 of 'emb' is repeated"),
        (np.array([3], np.int32), None, r"expected int64\[n\], got int32\[1\]"),
        (np.zeros((2, 1), np.int64), None, r"expected int64\[n\], got int64\[2, 1\]"),
    ],
)
def test_ids_that_name_no_rows_or_one_twice_are_refused(ids, below, message):
    with pytest.raises(WireError, match=message):
        check_row_ids(ids, below, "emb")


@pytest.mark.parametrize("ids", [np.zeros(0, np.int64), np.array([6, 0, 3])])
def test_unique_ids_in_any_order_are_taken(ids):
    check_row_ids(ids, 7, "emb")
