"""Of several jobs, one at a time writes checkpoints below a URL."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest

from elasticcb.errors import CheckpointError, UsageError
from elasticcb.master import checkpoint_lock, job_copy
from elasticcb.master.checkpoint_lock import CheckpointLock
from elasticcb.master.job_copy import owner_name, owner_record
from elasticcb.master.startup import own_checkpoints
from elasticcb.settings import CheckpointSettings, Command, JobSettings
from elasticcb.storage.job_store import JobStore


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setattr(job_copy, "SILENCE_SECONDS", 2.0)
    for module in (job_copy, checkpoint_lock):
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    return f"file://{tmp_path}/checkpoints"


@pytest.fixture
def take(url):
    with contextlib.ExitStack() as held:

        def take(run, say=pytest.fail):
            lock = CheckpointLock(url, f"--checkpoint_dir={url}", f"/jobs/{run}", run, say)
            held.callback(lock.release)
            return lock

        yield take


def test_a_second_job_is_refused_until_the_first_has_ended(take):
    first, told = take("one"), []
    with pytest.raises(UsageError, match=r"--checkpoint_dir=\S+ is in use by process \d+ .* /jobs/one\); or choose"):
        take("two", told.append)
    assert "Waiting until it is silent" in told[0]
    first.check()
    first.release()
    take("two").check()


def test_the_next_master_of_a_job_has_it_at_once_and_the_former_writes_no_more(take):
    former = take("one")
    take("one").check()
    with pytest.raises(CheckpointError, match="Another job took --checkpoint_dir="):
        former.check()


def test_a_job_that_was_killed_has_it_no_longer_when_it_was_silent(take, url):
    with contextlib.closing(JobStore(f"{url}/.checkpoints.lock")) as store:
        assert store.create(owner_name(1), owner_record("/jobs/killed", "killed"))
    take("one", lambda text: None).check()


def test_a_store_that_can_not_tell_who_was_first_is_told_of_once_and_used(caplog):
    settings = JobSettings(command=Command.TRAIN, checkpoint=CheckpointSettings(directory="memory://checkpoints"))
    context = SimpleNamespace(settings=settings, run="one", server=SimpleNamespace(print=pytest.fail))
    with caplog.at_level(logging.WARNING, "elasticcb"):
        assert own_checkpoints(context) is None
    (record,) = caplog.records
    assert "memory://checkpoints is not locked against other jobs" in record.getMessage()
    assert "no conditional writes" in record.getMessage()


def test_a_local_folder_is_the_same_by_its_path_and_by_its_url(tmp_path):
    with contextlib.ExitStack() as jobs:
        for folder, holds in ((f"{tmp_path}/a b", True), (f"file://{tmp_path}/a b", False)):
            settings = JobSettings(command=Command.TRAIN, checkpoint=CheckpointSettings(directory=folder))
            context = SimpleNamespace(settings=settings, run=folder, until_end=jobs)
            with contextlib.nullcontext() if holds else pytest.raises(UsageError, match="is in use by process"):
                own_checkpoints(context)
