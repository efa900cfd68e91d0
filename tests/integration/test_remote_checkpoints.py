"""Checkpoints below URLs: of a real S3 server, of memory and of a disk; and a job that writes to one."""

import json
import re
from dataclasses import replace

import fsspec
import numpy as np
import pytest
from stores import S3Server

from elasticcb.checkpoint import remote as remote_checkpoint
from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.parts import load_model
from elasticcb.checkpoint.remote import Files, writable
from elasticcb.checkpoint.shard_file import Part, write_part
from elasticcb.checkpoint.versions import server_file
from elasticcb.cli.main import main
from elasticcb.errors import CheckpointError, ExitCode, StoreError
from elasticcb.roles.master import run_master
from elasticcb.settings import Command
from elasticcb.sharding.partition import VariableSpec, partition
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.remote_files import problem_of
from jobs import LINEAR_MODEL, RecordingDisplay, job_settings, linear_data, write_model_file

SPEC = VariableSpec("dense/bias", (3,), "float32", True)


@pytest.fixture(scope="module")
def started():
    with S3Server("trained") as server:
        yield server


@pytest.fixture
def storage(started, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "s3", started.options)
    return started


@pytest.fixture(params=["s3", "file"])
def url(request, tmp_path):
    """Of a folder that does not exist yet."""
    if request.param == "s3":
        request.getfixturevalue("storage")
    place = {"s3": "s3://trained", "file": f"file://{tmp_path}/remote"}[request.param]
    return f"{place}/{tmp_path.name}"


def write(url, version, keep_max=0):
    """A version of one variable, whose elements are its number."""
    place = remote_checkpoint.place_of(url, version)
    with writable(f"{place}/{server_file(0, 1)}", None) as path:
        saved = write_part(path, Part(version, weights={0: np.full(3, version, "float32")}))
    parts = partition([SPEC], 1, split=False)
    remote_checkpoint.finish(place, keep_max, version=version, specs=[SPEC], parts=parts, files=[saved])
    return place


def weights(folder):
    return load_model(Files(str(folder)), read_manifest(folder), [SPEC]).weights[0].tolist()


def there(url):
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    return {path.removeprefix(root).strip("/") for path in files.find(root)}


def test_newest_version_comes_back_and_old_ones_and_halves_are_deleted(url, tmp_path):
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    files.makedirs(f"{root}/version-00000005", exist_ok=True)
    files.pipe_file(f"{root}/version-00000005/server-00000-of-00001.safetensors", b"half")
    files.pipe_file(f"{root}/notes.txt", b"not ours")
    for version in (10, 20, 30, 30):
        assert write(url, version, keep_max=2) == f"{url}/version-{version:08d}"
    names = {f"version-{version:08d}/{name}" for version in (20, 30)
             for name in ("manifest.json", "server-00000-of-00001.safetensors")}  # fmt: skip
    assert there(url) == names | {"notes.txt"}
    assert weights(remote_checkpoint.fetch(url, tmp_path / "copy")[0]) == [30] * 3
    assert weights(remote_checkpoint.fetch(f"{url}/version-00000020", tmp_path / "one")[0]) == [20] * 3


def test_torn_missing_and_foreign_files_are_named_and_the_version_before_is_used(url, tmp_path):
    for version in (10, 20, 30, 40, 50):
        write(url, version)
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    name = "server-00000-of-00001.safetensors"
    content = files.cat_file(f"{root}/version-00000050/{name}")
    files.pipe_file(f"{root}/version-00000050/{name}", content[:-1] + b"\xff")
    files.rm_file(f"{root}/version-00000040/{name}")
    manifest = files.cat_file(f"{root}/version-00000030/manifest.json")
    files.pipe_file(f"{root}/version-00000030/manifest.json", manifest[:-30])
    manifest = json.loads(files.cat_file(f"{root}/version-00000020/manifest.json"))
    manifest["servers"][0]["files"][0]["name"] = "../../elsewhere"
    del manifest["sealed"], manifest["checksum"]
    files.pipe_file(f"{root}/version-00000020/manifest.json", json.dumps(manifest).encode())
    folder, told = remote_checkpoint.fetch(url, tmp_path / "copy")
    assert weights(folder) == [10] * 3
    for line, words in zip(
        told, ("50: .*damaged", "40: .*can't be read", "30: .*manifest", "20: .*elsewhere"), strict=True
    ):
        assert line.startswith("Skipped version-000000")
        assert f"{url}/version-000000" in line
        assert str(tmp_path / "copy") not in line
        assert re.search(words, line), line
    files.rm(f"{root}/version-00000010", recursive=True)
    with pytest.raises(CheckpointError, match=r"(?s)No checkpoint in .* can be used.*00000050: .*00000020: "):
        remote_checkpoint.fetch(url, tmp_path / "again")
    with pytest.raises(CheckpointError, match="There is no complete checkpoint in"):
        remote_checkpoint.fetch(f"{url}/nothing", tmp_path / "none")


def test_version_whose_file_did_not_arrive_has_no_manifest(url, tmp_path):
    write(url, 10)
    place, path = remote_checkpoint.place_of(url, 20), tmp_path / server_file(0, 1)
    saved = write_part(path, Part(20, weights={0: np.zeros(3, "float32")}))  # on a disk that others don't see
    parts = partition([SPEC], 1, split=False)
    with pytest.raises(StoreError, match="did not arrive in"):
        remote_checkpoint.finish(place, 1, version=20, specs=[SPEC], parts=parts, files=[saved])
    assert remote_checkpoint.newest_version(url) == "version-00000010"


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_store_that_is_away_is_not_taken_for_a_damaged_version(url, tmp_path, monkeypatch):
    for version in (10, 20):
        write(url, version)
    get, removed = JobStore.get_file, [f"{url}/version-00000020"]

    def away(store, name, path):
        if name.startswith("version-00000020/server"):
            raise StoreError("503 Slow Down")
        get(store, name, path)

    with monkeypatch.context() as failing:
        failing.setattr(JobStore, "get_file", away)
        with pytest.raises(StoreError, match="503"):
            remote_checkpoint.fetch(url, tmp_path / "copy")

    def gone(store, name, path):  # the job that writes there deletes it just now
        while removed:
            files, root = fsspec.core.url_to_fs(removed.pop())
            files.rm(root, recursive=True)
        get(store, name, path)

    monkeypatch.setattr(JobStore, "get_file", gone)
    assert weights(remote_checkpoint.fetch(url, tmp_path / "copy")[0]) == [10] * 3
    assert remote_checkpoint.newest_of_run(url, "none") == ""

    def replaced(store, name, path):  # or all that there were, by newer ones
        if not JobStore(url).names("version-00000040"):
            write(url, 40, keep_max=1)
        get(store, name, path)

    monkeypatch.setattr(JobStore, "get_file", replaced)
    assert weights(remote_checkpoint.fetch(url, tmp_path / "other")[0]) == [40] * 3


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_table_command_reads_a_url(url, capsys):
    write(url, 10)
    assert main(["table", url]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith(f"{url}, version 10\nThere are no embedding tables")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://bucket/folder", "can't be used: .*Install the package"),
        ("sftp://me:secret@host/folder", "contains a password"),
        ("s3://KEY:sec/ret@bucket/folder", "contains a password"),
        ("simplecache::s3://KEY:secret@bucket/folder", "contains a password"),
        ("sftp://me@host:2222/a@b", "^$"),
        ("file://jobs/clicks", "has a relative path. Expected .* file:///"),
        ("s3:///folder", "names no bucket"),
        ("file://", "contains no folder"),
        ("s3://bucket/folder", "^$"),
    ],
)
def test_url_that_can_not_be_used_is_found_before_a_job(url, words):
    assert re.search(words, problem_of(url))


# ------------------------------------------------------------ jobs


@pytest.fixture
def settings(tmp_path):
    linear_data(tmp_path, train=640, test=64)
    return job_settings(
        write_model_file(tmp_path, LINEAR_MODEL, "linear"),
        tmp_path / "job",
        training=str(tmp_path / "train.npz"),
        validation=str(tmp_path / "test.npz"),
        minibatch_size=16,
        num_minibatches_per_task=5,
        num_epochs=5,
        directory=f"s3://trained/{tmp_path.name}",
        steps=20,
        num_ps=2,
    )


def test_job_writes_to_a_url_and_the_next_one_starts_there(storage, settings, tmp_path):
    summary = run_master(settings, RecordingDisplay())
    url = settings.checkpoint.directory
    assert summary.checkpoint_path == f"{url}/version-{summary.version:08d}"
    assert summary.checkpoints_failed == 0
    assert not list((tmp_path / "job").rglob("version-*"))
    newest = sorted(name for name in there(url) if name.startswith(f"version-{summary.version:08d}/server"))
    assert len(newest) == 2
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    files.pipe_file(f"{root}/{newest[0]}", b"torn")
    initial = replace(settings.checkpoint, directory="", directory_for_init=url)
    (tmp_path / "second").mkdir()
    second = replace(settings, command=Command.EVALUATE, directory=str(tmp_path / "second"), checkpoint=initial)
    display = RecordingDisplay()
    evaluated = run_master(second, display)
    assert 0 < evaluated.version <= summary.version
    assert evaluated.records_evaluated == 64
    assert any(line.startswith(f"Skipped version-{summary.version:08d}: ") for line in display.messages)
