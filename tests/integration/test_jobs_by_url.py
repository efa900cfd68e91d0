"""Jobs whose folder is a URL: on a real S3 server, with their machine stopped, lost, and continued by others."""

import json
import re
import secrets
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import fsspec
import pytest
from stores import S3Server, sftp_server

from elasticcb.api import job_folder
from elasticcb.api.job_folder import JobFolder
from elasticcb.checkpoint.manifest import written_parts
from elasticcb.cli.job import refuse_unfinished
from elasticcb.cli.main import main
from elasticcb.errors import ExitCode, JobFailedError, ReplacedError, StoreError, UsageError
from elasticcb.master.job_copy import JobCopy, _fetch
from elasticcb.master.journal import Journal
from elasticcb.master.recovery_files import RecoveryFiles
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import JOB_FILE, JOURNAL_FILE, Command, JobSettings
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.storage import durable, job_store
from elasticcb.storage.folder_lock import FolderLock
from elasticcb.storage.job_store import HOLDER_FILE, JobStore, finished_name
from elasticcb.storage.store_lock import newest_owner
from jobs import number, offsets_job, records_trained, train_flags

RECORDS, TESTED, IDS = 4_000, 400, 40


@pytest.fixture(scope="module")
def s3():
    with S3Server("jobs") as server:
        yield server


@pytest.fixture
def url(s3, monkeypatch, tmp_path):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", s3.options)
    return f"s3://jobs/{tmp_path.name}"


@pytest.fixture(params=["file"])
def store(request, tmp_path, monkeypatch):
    if request.param == "s3":
        place = request.getfixturevalue("url")
    elif request.param == "sftp":
        options = request.getfixturevalue("sftp")
        monkeypatch.setitem(fsspec.config.conf, "sftp", options)
        place = f"sftp://127.0.0.1{tmp_path}/job"
    else:
        place = f"file://{tmp_path}/job"
    with JobStore(place) as store:
        yield store


@pytest.fixture(scope="module")
def sftp(tmp_path_factory):
    with sftp_server(tmp_path_factory.mktemp("sshd")) as options:
        yield options


@pytest.mark.parametrize("store", ["s3", "sftp", "file"], indirect=True)
def test_store_keeps_files_and_tells_who_was_first(store, tmp_path):
    assert store.tells_who_was_first()
    assert store.names("owners") == []
    assert store.create("owners/1", b"one")
    assert store.create("owners/1", b"one")  # asked again, because the answer was lost
    assert not store.create("owners/1", b"two")
    store.put("owners/2", b"old")
    store.put("owners/2", b"new")
    (tmp_path / "here").write_bytes(b"content")
    store.put_file("files/here", tmp_path / "here")
    assert store.names("owners") == ["1", "2"]
    assert [store.get(f"owners/{each}") for each in (1, 2)] == [b"one", b"new"]
    store.get_file("files/here", tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == b"content"
    assert abs(store.now() - store.changed("owners/2")) < 60
    store.remove("owners/2")
    store.remove("owners/2")
    with pytest.raises(FileNotFoundError):
        store.get("owners/2")


@pytest.mark.parametrize("store", ["s3", "sftp", "file"], indirect=True)
def test_of_several_that_create_a_file_at_the_same_time_one_is_the_first(store):
    all_ready = threading.Barrier(4)

    def first(number):
        with JobStore(store.url) as own:
            own.names("")  # it is connected
            found = []
            for each in range(10):
                all_ready.wait(60)
                found.append(own.create(f"owners/{each}", b"%d" % number))
            return found

    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(first, range(4))]
    assert [sum(each) for each in zip(*found, strict=True)] == [1] * 10


def test_store_that_lets_two_be_first_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.setattr(job_store, "_EXCLUSIVE", {})  # then fsspec looks whether a file is there, and writes it
    with pytest.raises(StoreError, match=r"can't be a job's folder: .* no conditional writes"):
        JobCopy.taken(store.url, tmp_path, False, pytest.fail)


def test_a_folder_is_given_either_by_its_path_or_by_its_url(tmp_path):
    by_path, by_url = tmp_path / "by path", tmp_path / "by url"
    with FolderLock(by_path):
        pass
    with pytest.raises(UsageError, match="was given by its path"):
        JobCopy.taken(f"file://{by_path}", tmp_path, False, pytest.fail)
    JobCopy.taken(f"file://{by_url}", tmp_path, False, pytest.fail)
    with pytest.raises(UsageError, match="was given by its URL"):
        refuse_unfinished(JobSettings(command=Command.TRAIN, directory=str(by_url)))


def test_so_is_the_folder_of_a_program(tmp_path, monkeypatch):
    place, here = tmp_path / "job", tmp_path / "here"
    by_path, by_url = JobFolder(place, None), JobFolder(f"file://{place}", here)
    by_url.open()  # which has no fit yet
    by_path.open()
    with pytest.raises(UsageError, match="was given by its path"), by_url.next_fit():
        pass
    assert not [*place.glob("fit-1/owners/*")]
    with by_path.next_fit():
        pass
    for folder in (by_path, by_url):
        folder.close(done=False)
    with pytest.raises(UsageError, match="was given by its path"):
        by_url.open()
    shutil.rmtree(place)
    by_url.open()
    with by_url.next_fit():
        pass
    for _ in range(2):
        with pytest.raises(UsageError, match="was given by its URL"):
            by_path.open()
    assert not (place / ".lock").exists()
    refuse = job_folder.refuse_copy
    monkeypatch.setattr(job_folder, "refuse_copy", lambda path: (path / ".lock").exists() and refuse(path))
    with pytest.raises(UsageError, match="was given by its URL"):  # and when both begin at the same moment
        by_path.open()
    by_url.close(done=False)


@pytest.mark.parametrize("store", ["sftp", "file"], indirect=True)
def test_what_is_written_bit_by_bit_appears_at_once(store, tmp_path, monkeypatch):
    """A crash in the middle leaves the old file; an unfinished one is seen by nobody but who removes it."""
    store.put("owners/00000001", b'{"host": "old"}')
    (tmp_path / "here").write_bytes(b"new")
    files = store._files

    def torn(write):
        def tear(source, *given):
            write(*((source, b"{") if isinstance(given[0], bytes) else (source, *given)))
            raise KeyboardInterrupt

        return tear

    for name, write in (("pipe_file", lambda: store.put("owners/00000001", b'{"host": "new"}')),
                        ("put_file", lambda: store.put_file("owners/00000001", tmp_path / "here"))):  # fmt: skip
        with monkeypatch.context() as crash:
            crash.setattr(files, name, torn(getattr(files, name)))
            crash.setattr(files, "rm_file", lambda path: None)  # as when the process is killed
            with pytest.raises(KeyboardInterrupt):
                write()
        assert newest_owner(store) == (1, {"host": "old"})
    assert store.names("owners") == ["00000001"]
    left = store.names("owners", unfinished=True)
    assert [finished_name(name) for name in left] == ["00000001"] * 3
    monkeypatch.setattr(files, "mv", lambda *paths: (_ for _ in ()).throw(OSError("Operation unsupported")))
    store.put("owners/00000001", b'{"host": "new"}')  # as by a server that can't replace by renaming
    assert newest_owner(store) == (1, {"host": "new"})
    assert store.names("owners", unfinished=True) == left


def test_owner_whose_file_a_crash_left_empty_is_waited_for_as_a_silent_one(store, tmp_path, monkeypatch):
    monkeypatch.setattr("elasticcb.storage.store_lock.SILENCE_SECONDS", 3.0)
    JobCopy.taken(store.url, tmp_path, False, pytest.fail)
    store.create("owners/00000002", b"")
    (tmp_path / "other").mkdir()
    told = []
    assert JobCopy.taken(store.url, tmp_path / "other", True, told.append).owner.number == 3
    assert "Waiting until it is silent" in told[0]


def test_clock_of_a_store_that_was_set_back_keeps_nobody_waiting(store, tmp_path, monkeypatch):
    monkeypatch.setattr("elasticcb.storage.store_lock.SILENCE_SECONDS", 0.5)
    JobCopy.taken(store.url, tmp_path, False, pytest.fail)
    monkeypatch.setattr("elasticcb.storage.store_lock.BEAT_SECONDS", 0.2)
    now = JobStore.now
    monkeypatch.setattr(JobStore, "now", lambda self: now(self) - 3600)
    (tmp_path / "other").mkdir()
    assert JobCopy.taken(store.url, tmp_path / "other", True, print).owner.number == 2


@pytest.mark.parametrize("ended", [True, False])
def test_owner_that_ends_while_it_is_waited_for_is_not_refused(store, tmp_path, monkeypatch, ended):
    copy = JobCopy.taken(store.url, tmp_path, False, pytest.fail)
    Journal(tmp_path / JOURNAL_FILE)
    (tmp_path / "other").mkdir()
    ends = [lambda: copy._end(False) if ended else copy.remove()]
    monkeypatch.setattr("elasticcb.storage.store_lock.BEAT_SECONDS", 0.1)
    assert JobCopy.taken(store.url, tmp_path / "other", True, lambda text: ends and ends.pop()()).owner.number == 2


def test_job_whose_copy_is_gone_does_not_begin_again(store, tmp_path, monkeypatch):
    """As when the file system of its URL is not mounted: what is here is all that is left of it."""
    monkeypatch.setattr("elasticcb.master.job_copy.PATIENCE_SECONDS", 0.0)
    here = tmp_path / "here"
    here.mkdir()
    copy = JobCopy.taken(store.url, here, False, pytest.fail)
    journal = Journal(here / JOURNAL_FILE)
    journal.add(version=7)
    store.remove_all()
    with pytest.raises(StoreError, match=r"has no files of the job in .* any more.* not mounted"):
        JobCopy.taken(store.url, here, True, print)
    with pytest.raises(StoreError, match="not mounted"):
        copy._beat(JobSnapshot)
    assert Journal(here / JOURNAL_FILE).memory.version == 7
    assert JobCopy.taken(store.url, here, False, pytest.fail).owner.number == 1  # a new job may begin there


def test_file_that_a_server_has_written_is_kept_until_it_has_answered(store, tmp_path):
    """A server may leave, and the manifest be written, while another is about to answer."""
    parts = [[Slice(0, 0, 4)], [Slice(0, 4, 8)]]
    specs = [VariableSpec("v", (8,), "float32", True)]
    copy = JobCopy.taken(store.url, tmp_path, False, pytest.fail).of_recovery()
    recovery = RecoveryFiles(tmp_path / "recovery", "run", specs, copy)

    def save(index, after=""):
        request = recovery.request(index, parts, 0)
        name = request.path.rpartition("/")[2]
        store.put(f"recovery/{name}", b"part")
        return pb.SaveResponse(file=name, bytes=4, sha256=sha256(b"part").hexdigest(), version=1, after=request.after)

    for index in range(2):
        recovery.note(index, save(index), parts)
    recovery.write()
    answer = save(1)
    store.put(f"recovery/.tmp-0123-{answer.file}", b"pa")  # of another
    last = "ps-1-last-0123.safetensors"  # the other one leaves too, and has written this by itself
    store.put(f"recovery/{last}", b"part")
    recovery.take_last(0, save(0))
    assert {answer.file, last} < {*store.names("recovery")}
    recovery.note(1, answer, parts)
    recovery.write()
    store.remove(f"recovery/{last}")
    listed = {file.name for part in written_parts(recovery.manifest(), tmp_path) for file in part.files}
    there = {name for name in store.names("recovery", unfinished=True) if "ps-" in name}
    assert listed == {*there} - {f".tmp-0123-{answer.file}"}


def test_bucket_that_is_not_there_is_told(url, tmp_path):
    with pytest.raises(StoreError, match="s3://no-such-bucket/job can't be written to"):
        JobCopy.taken("s3://no-such-bucket/job", tmp_path, False, pytest.fail)


def test_of_two_masters_one_is_the_owner(store, tmp_path, monkeypatch):
    monkeypatch.setattr("elasticcb.storage.store_lock.SILENCE_SECONDS", 2.0)
    monkeypatch.setattr("elasticcb.storage.store_lock.BEAT_SECONDS", 0.2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    taken, told = JobCopy.taken(store.url, tmp_path / "one", False, pytest.fail), []
    again = JobCopy.taken(store.url, tmp_path / "one", True, pytest.fail)  # the same folder need not wait
    assert (taken.owner.number, again.owner.number) == (1, 2)
    other = JobCopy.taken(store.url, tmp_path / "two", True, told.append)
    assert other.owner.number == 3
    assert re.search(r"was used by process \d+ on .* s ago\. Waiting", told[0])
    with pytest.raises(ReplacedError, match="Another master took over"):
        again._beat(JobSnapshot)


def test_copy_that_was_not_fetched_as_a_whole_is_fetched_again(store, tmp_path, monkeypatch):
    monkeypatch.setattr("elasticcb.storage.store_lock.SILENCE_SECONDS", 0.0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    JobCopy.taken(store.url, tmp_path / "one", False, print)
    JobCopy.taken(store.url, tmp_path / "two", True, print)
    with monkeypatch.context() as broken:
        broken.setattr("elasticcb.master.job_copy.PATIENCE_SECONDS", 0.0)
        broken.setattr("elasticcb.master.job_copy._fetch", lambda *given: (_ for _ in ()).throw(StoreError("away")))
        with pytest.raises(StoreError):
            JobCopy.taken(store.url, tmp_path / "one", True, print)
    assert JobCopy.taken(store.url, tmp_path / "one", True, print).was_fetched
    assert not JobCopy.taken(store.url, tmp_path / "one", True, print).was_fetched


def test_of_two_programs_the_second_is_refused_before_its_first_fit(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/job"
    first, second = (JobFolder(url, tmp_path / name) for name in ("one", "two"))
    first.open()
    for _ in range(2):
        with first.next_fit() as fit:
            pass
    fit.copy._store.put("owners/00000001", json.dumps({"holder": "of the first", "ended": False}).encode())
    monkeypatch.setattr("elasticcb.storage.store_lock.BEAT_SECONDS", 0.2)
    monkeypatch.setattr(JobStore, "changed", lambda self, name: time.time())  # it writes all the time
    with pytest.raises(UsageError, match="is in use by process"):
        second.open()
    first.close(done=True)
    assert not any((tmp_path / "job").glob("fit-*"))


def test_every_state_in_which_a_crash_leaves_the_copy_can_be_read_and_damage_is_told(tmp_path, monkeypatch):
    """All that is written is recorded; each prefix of it is what a machine may leave that is lost."""
    monkeypatch.setattr("elasticcb.master.job_copy._SEGMENTS", 4)
    place, here, states = tmp_path / "copy", tmp_path / "here", []
    here.mkdir()

    def recorded(write):
        def record(self, *given):
            write(self, *given)
            states.append(tmp_path / f"state-{len(states)}")
            shutil.copytree(place, states[-1])

        return record

    for name in ("put", "put_file", "remove"):
        monkeypatch.setattr(JobStore, name, recorded(getattr(JobStore, name)))
    copy = JobCopy.taken(f"file://{place}", here, False, pytest.fail)
    durable.write_document(here / JOB_FILE, {})
    journal = Journal(here / JOURNAL_FILE)
    for version in range(1, 16):
        journal.add(version=version)
        if version in (6, 13):
            journal.rewrite([])  # a new generation
        copy._send()
    monkeypatch.undo()

    def version_in(state, say=print):
        folder = tmp_path / f"read-{secrets.token_hex(4)}"
        folder.mkdir()
        with JobStore(f"file://{state}") as store:
            _fetch(store, folder, say)
        return Journal(folder / JOURNAL_FILE).memory.version if (folder / JOURNAL_FILE).exists() else 0

    versions = [version_in(state) for state in states]
    assert versions == sorted(versions)
    assert set(versions) == {0, *range(1, 16)}
    segments = sorted((states[-1] / "journal").iterdir())
    assert len(segments) >= 2
    for segment in segments:
        content = segment.read_bytes()
        for place in range(0, len(content), 7):
            segment.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            with pytest.raises(JobFailedError, match=r"journal .* is damaged"):
                version_in(states[-1])
        segment.write_bytes(content)
    first = segments[0].read_bytes()
    segments[0].unlink()
    with pytest.raises(StoreError, match="the first is missing"):
        version_in(states[-1])
    segments[0].write_bytes(first)
    segments[-2].unlink()
    told = []
    assert version_in(states[-1], told.append) < 15
    assert "has a hole" in told[0]


@pytest.mark.deep  # test_restarted_programs.py has a program that goes on from a URL
def test_job_goes_on_elsewhere_and_the_former_master_gives_way(url, tmp_path, start_job, faults, monkeypatch, capsys):
    offsets_job(tmp_path, IDS, train=RECORDS, test=TESTED)
    faults.shorten("elasticcb.storage.store_lock.SILENCE_SECONDS", 8.0)  # longer than a busy machine is
    faults.shorten("elasticcb.storage.store_lock.BEAT_SECONDS", 0.5)
    more = {"num_ps": 2, "num_epochs": 5, "checkpoint_interval": 0.2, "evaluation_steps": 200, "job_dir": url}
    places = [tmp_path / name for name in ("first", "second", "third")]
    for place in places:
        place.mkdir()
    first = start_job("train", *train_flags(tmp_path, "offsets", **more), cwd=places[0])
    first.wait_for_line(r"Evaluation at version")
    capsys.readouterr()
    (folder,) = (places[0] / "jobs").iterdir()
    (folder / HOLDER_FILE).unlink()  # as seen from another machine
    refused = start_job("resume", url, cwd=places[1])
    refused.wait_for_line("is in use by process .*; two masters")
    assert refused.finish() == ExitCode.WRONG_USAGE
    everybody = [first.process, *first.family]
    for process in everybody:
        process.send_signal(signal.SIGSTOP)

    assert main(["status", url]) == ExitCode.DONE
    assert re.search(r"\(train\): .*\n(.*\n)*  as its master wrote \d+ s ago", capsys.readouterr().out)
    assert main(["export", url, f"--output={tmp_path / 'exported'}"]) == ExitCode.DONE
    assert (tmp_path / "exported" / "saved_model.pb").is_file()
    assert main(["table", url]) == ExitCode.WRONG_USAGE
    assert "Call this command there" in capsys.readouterr().err
    assert main(["stop", url]) == ExitCode.WRONG_USAGE
    assert "Call this command there" in capsys.readouterr().err
    assert main(["train", *train_flags(tmp_path, "offsets", **more)]) == ExitCode.WRONG_USAGE
    assert f"elasticcb resume {url}" in capsys.readouterr().err

    second = start_job("resume", url, cwd=places[1])
    second.wait_for_line(r"Parameter server \d resumes from its recovery files")
    for process in everybody:
        process.send_signal(signal.SIGCONT)
    first.wait_for_line("Another master took over")
    first.finish()
    first.assert_no_orphans()
    second.wait_for_line(r"Evaluation at version")
    for process in [second.process, *second.family]:
        process.send_signal(signal.SIGKILL)
    shutil.rmtree(places[1])

    third = start_job("resume", url, cwd=places[2])
    assert third.finish() == 0, third.output
    assert records_trained(third.output) == [RECORDS] * 5
    assert number(third.output, "duplicate records (at most)") < 3 * RECORDS
    error = float(re.findall(r"Evaluation at version .*error ([\d.e-]+)", third.output)[-1])
    assert error < 0.1
    third.assert_no_orphans()
    with JobStore(url) as store:
        assert store.names("recovery") == []
    shutil.rmtree(places[2])
    capsys.readouterr()
    assert main(["status", url]) == ExitCode.DONE
    assert "(train): done" in capsys.readouterr().out
    assert main(["logs", url, "--worker=0"]) == ExitCode.DONE
    assert capsys.readouterr().out
    assert main(["resume", url]) == ExitCode.WRONG_USAGE
    assert "is done; there is nothing to continue" in capsys.readouterr().err


@pytest.mark.deep
def test_store_that_is_away_is_told_of_and_pauses_the_job_until_it_is_back(
    url, s3, tmp_path, start_job, faults, monkeypatch
):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # else its library tries for minutes
    monkeypatch.setenv("FSSPEC_S3", json.dumps({"config_kwargs": {"read_timeout": 5}}))
    offsets_job(tmp_path, IDS, train=RECORDS, test=TESTED)
    faults.shorten("elasticcb.master.job_copy.SLOW_SECONDS", 2.0)
    faults.shorten("elasticcb.master.job_copy.PATIENCE_SECONDS", 4.0)
    more = {"num_ps": 2, "num_epochs": 15, "checkpoint_interval": 0.5, "job_dir": url}
    job = start_job("train", *train_flags(tmp_path, "offsets", **more))
    job.wait_for_line("Epoch")
    s3.stop()
    job.wait_for_line("Training continues here for up to 4 s")
    job.wait_for_line("Training pauses until it can be")
    s3.start()
    job.wait_for_line("can be written to again. Training continues")
    with s3.hanging():
        job.wait_for_line("Training continues here")  # has not answered, or refused the first call
        job.wait_for_line("Training pauses until it can be")
    job.wait_for_line("can be written to again. Training continues")
    s3.stop()
    job.kill("ps")
    job.wait_for_line(r"Parameter server \d waits for its files")
    job.kill("master")
    job.wait_for_line("Waiting up to 4 s for it")
    s3.start()
    job.wait_for_line(r"Parameter server \d recovered in .* from its recovery files")
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 15
    assert float(re.findall(r"Evaluation at version .*error ([\d.e-]+)", job.output)[-1]) < 0.1
    job.assert_no_orphans()
