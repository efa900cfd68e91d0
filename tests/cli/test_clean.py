"""`elasticcb clean` removes what is of no use any more, and nothing else."""

from __future__ import annotations

import os
import socket
import tempfile

import pytest

from elasticcb.cli.main import main
from elasticcb.master.journal import Journal
from elasticcb.security import socket_folder
from elasticcb.settings import JOURNAL_FILE
from elasticcb.storage.folder_lock import FolderLock
from elasticcb.storage.local_folders import TemporaryFolder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    # The other place for folders of sockets is that of jobs which run beside this test.
    monkeypatch.setattr(socket_folder, "_OTHER_PARENT", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def killed(place):
    """A temporary folder whose owner is gone."""
    folder = TemporaryFolder()
    (folder.path / "arrays.bin").write_bytes(bytes(2_000_000))
    folder._lock.release()  # as the system does when a process ends
    os.utime(folder.path, (0, 0))
    return folder.path


def make_job(place, name, over):
    folder = place / "jobs" / name
    (folder / "recovery" / "ps-0").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "recovery" / "ps-0" / "part").write_bytes(bytes(3_000_000))
    with FolderLock(folder):
        journal = Journal(folder / JOURNAL_FILE)
        journal.add(over=over)
        journal.close()
    return folder


def test_sockets_of_a_killed_job_go(place, capsys):
    folder = place / "tmp" / "elasticcb-sockets-a"
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(folder / "17"))
    os.utime(folder, (0, 0))
    assert main(["clean"]) == 0
    assert f"0.0 MB  {folder}" in capsys.readouterr().out
    assert not folder.exists()


def test_recovery_files_of_done_jobs_and_folders_of_killed_clusters_go_and_all_else_stays(place, killed, capsys):
    done, resumable, running = (make_job(place, name, name != "b") for name in "abc")
    (place / "jobs" / "notes.txt").touch()
    lock = FolderLock(running)
    lock.take()
    assert main(["clean", "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert f"2.0 MB  {killed}" in shown
    assert f"3.0 MB  {done / 'recovery'}" in shown
    assert "Would remove 2 folders, 5.0 MB." in shown
    assert killed.is_dir()
    assert (done / "recovery").is_dir()
    assert main(["clean"]) == 0
    lock.release()
    assert "Removed 2 folders, 5.0 MB." in capsys.readouterr().out
    assert not killed.exists()
    assert {folder.name: (folder / "recovery").is_dir() for folder in (done, resumable, running)} == {
        "a": False,
        "b": True,
        "c": True,
    }
    assert (done / "logs").is_dir()


def test_only_the_jobs_that_are_named_are_looked_at(place):
    first, second = (make_job(place, name, True) for name in "ab")
    assert main(["clean", "b"]) == 0
    assert (first / "recovery").is_dir()
    assert not (second / "recovery").exists()


def test_journal_that_can_not_be_read_keeps_the_files_of_its_job(place):
    job = make_job(place, "a", True)
    (job / JOURNAL_FILE).write_bytes(b"damaged\n")
    assert main(["clean"]) == 0
    assert (job / "recovery").is_dir()
