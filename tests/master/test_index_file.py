"""Indexes in a job's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticcb.master.source_counts import read_indexes, write_indexes


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.deep)])
def test_damaged_indexes_are_not_used(tmp_path: Path, every: int) -> None:
    path, indexes = tmp_path / "recovery/index.zip", {"s3://a": b"index"}
    write_indexes(path, '{"password": "secret"}', indexes)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_indexes(path, '{"password": "secret"}') == indexes
    assert read_indexes(path, "{}") == {}
    whole = path.read_bytes()
    assert b"secret" not in whole
    for place in range(0, 8 * len(whole), every):  # zipfile raises errors of many kinds
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert read_indexes(path, '{"password": "secret"}') in ({}, indexes)
