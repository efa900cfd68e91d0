"""Temporary folders of owners that live, and of those that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from elasticcb.storage.local_folders import TemporaryFolder, abandoned_folders

_OWNER = """
import sys
from elasticcb.storage.local_folders import TemporaryFolder
folder = TemporaryFolder()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_old(folder):
    os.utime(folder, (0, 0))


def test_only_the_old_folder_of_an_owner_that_was_killed_is_abandoned(temporary):
    with TemporaryFolder() as mine:
        make_old(mine)
        (temporary / "elasticcb-of-somebody").mkdir()
        make_old(temporary / "elasticcb-of-somebody")
        with subprocess.Popen(
            [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            folder = process.stdout.readline().strip()
            make_old(folder)
            assert list(abandoned_folders()) == []
            process.kill()
        assert [str(found) for found in abandoned_folders()] == [folder]
        os.utime(folder)
        assert list(abandoned_folders()) == []
        assert [str(found) for found in abandoned_folders(least_age_seconds=0)] == [folder]
    assert not mine.exists()
