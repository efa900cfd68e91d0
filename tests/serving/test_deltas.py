"""Tables with changes, against dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elasticcb.serving.deltas import TableChange, combined, moved
from elasticcb.serving.exports import bridge

IDS = st.integers(0, 12)
TABLES = st.dictionaries(IDS, st.integers(0, 99))
CHANGES = st.lists(st.tuples(TABLES, st.sets(IDS)), min_size=1, max_size=4)


def array(values, dtype=np.int64):
    return np.array(list(values), dtype)


@given(TABLES, CHANGES)
def test_table_with_changes_is_that_of_a_dictionary(table, changes):
    expected = dict(table)
    for rows, gone in changes:
        expected = {id: row for id, row in expected.items() if id not in gone} | rows
    found = [TableChange(array(rows), array(rows.values(), np.float32)[:, None], array(gone)) for rows, gone in changes]
    ids = array(sorted(table))
    rows = array((table[id] for id in sorted(table)), np.float32)[:, None]
    change = combined(found)
    after, sources, places = moved(ids, change)
    assert after.tolist() == sorted(expected)
    assert (after is ids) == (sorted(table) == sorted(expected))
    new = rows[sources] if len(rows) else np.zeros((len(after), 1))
    new[places] = change.rows
    assert new[:, 0].tolist() == [expected[id] for id in sorted(expected)]


def test_deltas_lead_over_a_full_export():
    names = ["full-00000001", "delta-00000001-00000002", "delta-00000002-00000004", "full-00000004", "other"]
    assert bridge(names, 1, {4}) == names[1:3]
    assert bridge(names, 2, {2}) == []
    assert bridge(names, 3, {4}) == []
