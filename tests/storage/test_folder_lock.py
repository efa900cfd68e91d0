"""One owner of a folder at a time; temporary folders of owners that live, and of those that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from elasticcb.errors import UsageError
from elasticcb.storage.folder_lock import FolderInUseError, FolderLock
from elasticcb.storage.local_folders import TemporaryFolder, abandoned_folders

_OWNER = """
import sys, time
from pathlib import Path
from elasticcb.storage.folder_lock import FolderLock
FolderLock(Path(sys.argv[1])).take()
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_folder_has_one_owner_whose_process_is_named(tmp_path):
    with (
        FolderLock(tmp_path / "job"),
        pytest.raises(FolderInUseError, match=rf"job is in use by process {os.getpid()}"),
    ):
        FolderLock(tmp_path / "job").take()
    FolderLock(tmp_path / "job").take()


def test_a_folder_may_be_of_one_job_and_of_its_checkpoints(tmp_path):
    with FolderLock(tmp_path), FolderLock(tmp_path, file=".checkpoints.lock"), pytest.raises(FolderInUseError):
        FolderLock(tmp_path, file=".checkpoints.lock").take()


def test_taking_what_one_has_changes_nothing(tmp_path):
    lock = FolderLock(tmp_path)
    lock.take()
    lock.take()
    lock.release()
    with FolderLock(tmp_path):
        lock.release()


def test_a_folder_that_can_not_be_locked_is_told(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UsageError, match=r"can't be used: .*Choose another folder"), FolderLock(tmp_path):
        pass


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        with pytest.raises(FolderInUseError, match=f"process {process.pid}"):
            FolderLock(tmp_path).take()
        process.kill()
    FolderLock(tmp_path).take()


def test_a_link_that_somebody_has_put_in_its_place_is_refused(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match=r"/\.lock is a symbolic link, .* Remove it\."):
        FolderLock(tmp_path).take()
    assert (tmp_path / "mine").read_text() == "mine"


# ---------------------------------------------------------------- temporary folders


_FOLDER_OWNER = """
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
            [sys.executable, "-c", _FOLDER_OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
