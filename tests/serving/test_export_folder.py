"""What the writer of exports does with their folder, local and below a URL."""

import contextlib
import re

import fsspec
import pytest
from stores import S3Server

from elasticcb.checkpoint.shard_file import Part, write_part
from elasticcb.errors import CheckpointError, UsageError
from elasticcb.serving.export_folder import ExportFolder
from elasticcb.serving.exports import Export, unneeded, way_to
from elasticcb.storage import store_lock
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.remote_files import is_url


@pytest.fixture(scope="module")
def s3():
    with S3Server("exports") as server:
        yield server


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path, monkeypatch):
    if request.param == "local":
        return str(tmp_path / "exports")
    server = request.getfixturevalue("s3")
    monkeypatch.setattr(store_lock, "SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(store_lock, "BEAT_SECONDS", 0.3)
    monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
    return f"s3://exports/{tmp_path.name}"


@pytest.fixture
def opened(place):
    """Opens the folder for a training."""
    with contextlib.ExitStack() as stack:

        def open_it(run):
            folder = ExportFolder(place)
            stack.callback(folder.leave)
            folder.own(run, f"jobs/{run}", print)
            return folder

        yield open_it


def finish(folder, export, tmp_path):
    folder.begin(export.name)
    saved = write_part(tmp_path / "server", Part(export.version))
    folder.put(f"{export.name}/server", (tmp_path / "server").read_bytes())
    content = {"version": 1, "specs": [], "parts": [[]], "files": [[saved]]}
    folder.finish(export.name, **content, extra=export.to_extra())


def export(version, since=None, written=0.0):
    return Export(version, since, "me", "clicks", version, written)


def test_what_a_killed_exporter_has_not_finished_is_removed_and_versions_go_on(opened, place, tmp_path):
    folder = opened("first")
    finish(folder, export(5, written=50.0), tmp_path)
    finish(folder, export(7, 5, written=70.0), tmp_path)
    unfinished = "delta-00000007-00000009/server", "snapshot-00000009-0a1b2c3d/server", "full-00000009/saved_model.pb"
    for name in (*unfinished, "snapshot-of-mine/precious"):
        folder.begin(name.partition("/")[0])
        folder.put(name, b"half")
    folder.put("readme.txt", b"of the user's")
    folder.put(".tmp-current.json-0a1b2c3d", b"{")
    folder.leave()
    folder = opened("first")
    assert folder.begin_again() == ({"full-00000005": 50.0, "delta-00000005-00000007": 70.0}, 9)
    assert folder.begin_again() == ({"full-00000005": 50.0, "delta-00000005-00000007": 70.0}, 7)
    folder.remove("full-00000005")
    assert list(folder.begin_again()[0]) == ["delta-00000005-00000007"]
    with JobStore(place if is_url(place) else f"file://{place}") as store:
        assert store.get("snapshot-of-mine/precious") == b"half"
        assert store.names("snapshot-00000009-0a1b2c3d") == []
        assert not [name for name in store.names("", unfinished=True) if name.startswith(".tmp-")]


def test_a_folder_that_its_owner_has_left_is_free(opened):
    first = opened("first")
    with pytest.raises(UsageError, match="is in use by process"):
        opened("second")
    first.check_owner()
    first.leave()
    opened("second").check_owner()


@pytest.mark.parametrize("place", ["s3"], indirect=True)  # the lock of a local folder ends with its process
def test_a_url_whose_owner_was_killed_is_free_for_its_next_master_at_once(opened):
    killed = opened("first")
    resumed = opened("first")
    resumed.check_owner()
    with pytest.raises(UsageError, match="Another job took s3://"):
        killed.check_owner()  # it was only silent


def test_an_export_without_a_file_of_a_server_is_not_finished(opened, tmp_path):
    folder = opened("first")
    missing = write_part(tmp_path / "elsewhere", Part(3))
    folder.begin("delta-00000001-00000003")
    content = {"version": 3, "specs": [], "parts": [[]], "files": [[missing]]}
    with pytest.raises(CheckpointError, match="must share the folder"):
        folder.finish("delta-00000001-00000003", **content, extra={})


def test_exports_are_removed_with_the_full_one_that_leads_to_them():
    written = {"full-00000010": 10, "full-00000030": 30, "full-00000050": 50, "full-00000060": 60}
    written |= {f"delta-{version - 10:08d}-{version:08d}": version for version in (20, 30, 40, 60, 70)}
    way = way_to(list(written))
    assert way == ["full-00000060", "delta-00000060-00000070"]

    def removed(oldest):
        return [re.sub("0{4,}", "", name) for name in unneeded(written, way, oldest)]

    assert removed(0) == []
    assert removed(25) == ["full-10", "delta-10-20", "delta-20-30"]
    assert removed(55) == ["full-10", "delta-10-20", "delta-20-30", "full-30", "delta-30-40", "full-50", "delta-50-60"]
    assert removed(1000) == removed(55)
