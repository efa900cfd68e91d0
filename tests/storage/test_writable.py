"""Folders of jobs are their owners' alone."""

from __future__ import annotations

import stat

import pytest

from elasticcb.storage.writable import make_private


@pytest.mark.parametrize(("before", "after"), [(None, 0o700), (0o755, 0o700), (0o700, 0o700), (0o1777, 0o1777)])
def test_a_folder_is_made_private_unless_it_is_for_all(tmp_path, before, after):
    folder = tmp_path / "a" / "job"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == after
