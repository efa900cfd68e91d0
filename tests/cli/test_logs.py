"""What a process of a job on this machine wrote, and when that is all."""

import errno
import fcntl

import pytest

from elasticcb.clients.local_job import log_lines
from elasticcb.clients.running_master import RunningMaster, has_ended, published
from elasticcb.errors import UsageError
from elasticcb.security.credentials import Access
from elasticcb.storage.folder_lock import FolderLock


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/worker-0.log").write_text("one\ntwo\x0bhalf\nthree\n")
    return tmp_path


def test_the_last_lines_are_given(folder):
    assert list(log_lines(folder, "worker-0", 2, follow=False)) == ["two\x0bhalf\n", "three\n"]
    with pytest.raises(UsageError, match="has no log of ps-0; logs: worker-0"):
        list(log_lines(folder, "ps-0", 2, follow=False))


@pytest.mark.parametrize("locks", [True, False])
def test_a_job_that_runs_is_not_over_where_locks_are_not_known_either(tmp_path, monkeypatch, locks):
    def unknown(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", unknown)
    with FolderLock(tmp_path):
        with published(tmp_path, RunningMaster.of("localhost:1", Access("token"), "", "")):
            assert not has_ended(tmp_path)
        assert has_ended(tmp_path) != locks  # processes may still be about to end
    assert has_ended(tmp_path)
