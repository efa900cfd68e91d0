"""Of several jobs, one at a time writes below a URL."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fsspec.implementations.local import LocalFileSystem

from elasticcb.errors import StoreError, UsageError
from elasticcb.master.checkpoint_writer import own_checkpoints
from elasticcb.settings import CheckpointSettings, Command, JobSettings
from elasticcb.storage import store_lock
from elasticcb.storage.job_store import OWNERS, JobStore
from elasticcb.storage.store_lock import Owner, StoreLock


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setattr(store_lock, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(store_lock, "BEAT_SECONDS", 0.1)
    return f"file://{tmp_path}/checkpoints"


@pytest.fixture
def take(url):
    with contextlib.ExitStack() as held:

        def take(run, say=pytest.fail):
            lock = StoreLock(url, ".lock", f"--checkpoint_dir={url}", f"/jobs/{run}", run, say)
            held.callback(lock.release)
            return lock

        yield take


def test_a_second_job_is_refused_until_the_first_has_ended(take):
    first, told = take("one"), []
    with pytest.raises(UsageError, match=r"--checkpoint_dir=\S+ is in use by process \d+ .* /jobs/one\); or choose"):
        take("two", told.append)
    assert "Waiting until it is silent" in told[0]
    assert not first.problem()
    first.release()
    assert not take("two").problem()


def test_the_next_master_of_a_job_has_it_at_once_and_the_former_writes_no_more(take):
    former = take("one")
    assert not take("one").problem()
    assert former.problem().startswith("Another job took --checkpoint_dir=")


def test_a_job_that_was_killed_has_it_no_longer_when_it_was_silent(take, url):
    with JobStore(f"{url}/.lock") as store:
        assert Owner(1, "/jobs/killed", "killed").take(store)
    assert not take("one", lambda text: None).problem()


@pytest.mark.parametrize("content", [b"", b"[7]", b"7", b'"x"', b"null", b'{"ended": 0'])
def test_what_an_owner_has_not_written_is_taken_for_a_killed_one(take, url, content):
    with JobStore(f"{url}/.lock") as store:
        store.put(f"{OWNERS}/00000001", content)
    assert not take("one", lambda text: None).problem()


def test_of_two_that_begin_at_the_same_time_one_is_refused(take, monkeypatch):
    both = threading.Barrier(2)
    create = JobStore.create

    def create_together(self, name, content):
        if not name.startswith("probe"):
            both.wait(60)  # each has seen that nobody has it
        return create(self, name, content)

    monkeypatch.setattr(JobStore, "create", create_together)

    def outcome(run):
        try:
            take(run)
        except UsageError as error:
            return str(error)
        return "taken"

    with ThreadPoolExecutor(2) as threads:
        refused, taken = sorted(threads.map(outcome, ["one", "two"]))
    assert taken == "taken"
    assert "has just been taken by another job" in refused


def test_a_full_disk_is_not_taken_for_another_job(url, monkeypatch):
    def full(self, *arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with JobStore(url) as store:
        owner, other = Owner(1, "/jobs/one", "one"), Owner(1, "/jobs/one", "one")
        assert owner.take(store)
        assert not other.take(store)
        monkeypatch.setattr(LocalFileSystem, "open", full)
        with pytest.raises(StoreError, match="No space left on device"):
            other.take(store)


def test_a_store_that_can_not_tell_who_was_first_is_told_of_once_and_used(caplog):
    settings = JobSettings(command=Command.TRAIN, checkpoint=CheckpointSettings(directory="memory://checkpoints"))
    context = SimpleNamespace(settings=settings, run="one", server=SimpleNamespace(print=pytest.fail))
    context.until_end = contextlib.ExitStack()
    with caplog.at_level(logging.WARNING, "elasticcb"):
        assert own_checkpoints(context)
    (record,) = caplog.records
    assert "'memory://checkpoints' is not locked against other jobs" in record.getMessage()
    assert "no conditional writes" in record.getMessage()


def test_a_local_folder_is_the_same_by_its_path_and_by_its_urls(tmp_path):
    with contextlib.ExitStack() as jobs:
        for folder, holds in (
            (f"{tmp_path}/a b", True),
            (f"file://{tmp_path}/a b", False),
            (f"local://{tmp_path}/a b", False),
        ):
            settings = JobSettings(command=Command.TRAIN, checkpoint=CheckpointSettings(directory=folder))
            context = SimpleNamespace(settings=settings, run=folder, until_end=jobs)
            context.server = SimpleNamespace(print=pytest.fail)
            with contextlib.nullcontext() if holds else pytest.raises(UsageError, match="is in use by process"):
                own_checkpoints(context)
