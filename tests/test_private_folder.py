"""Folders of jobs are their owners' alone, and those of other users are refused."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticcb.api.processes import ClusterProcesses
from elasticcb.cluster.ray.actor import PlaceOnNode
from elasticcb.cluster.role import RoleProcess
from elasticcb.errors import UsageError
from elasticcb.security.credentials import Access
from elasticcb.security.socket_folder import SocketFolder, check_temporary, make_private
from elasticcb.security.tls import make_ca
from elasticcb.settings import ClusterSettings

SOMEBODY, STRANGER = 65534, 1234  # the user who runs a job, and another one


@pytest.mark.parametrize(("before", "after"), [(None, 0o700), (0o755, 0o700), (0o700, 0o700), (0o1777, 0o1777)])
def test_a_folder_is_made_private_unless_it_is_for_all(tmp_path, before, after):
    folder = tmp_path / "a" / "job"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == after


@pytest.fixture
def folder_of():
    """Makes a folder in one that all users can enter."""
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)

        def make(user, mode=0o777, name="job"):
            folder = Path(parent, name)
            folder.mkdir()
            folder.chmod(mode)
            os.chown(folder, user, user)
            return folder

        yield make


def tell_as_somebody(function, argument, own_id, pipe):
    os.setuid(SOMEBODY)
    if own_id is not None:
        os.geteuid = lambda: own_id
    try:
        function(argument)
        pipe.send("")
    except UsageError as error:
        pipe.send(str(error))


@pytest.fixture
def told_somebody(another_user):
    """What somebody is told whose job uses a folder; "": nothing."""
    return lambda function, argument, own_id=None: another_user(tell_as_somebody, function, argument, own_id).recv()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_of_another_user_is_refused(told_somebody, folder_of, mode):
    folder = folder_of(STRANGER, mode)
    assert f"{folder} belongs to another user (uid {STRANGER})" in told_somebody(make_private, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert list(folder.iterdir()) == []
    make_private(folder)  # root may


def test_folders_of_root_can_be_used(told_somebody, folder_of):
    assert told_somebody(make_private, folder_of(0)) == ""


def test_a_folder_is_ones_own_where_the_file_system_takes_all_users_for_one(told_somebody, folder_of):
    assert told_somebody(make_private, folder_of(SOMEBODY), own_id=STRANGER) == ""


def test_the_ca_of_a_job_is_not_written_into_a_folder_of_another_user(told_somebody, folder_of):
    job = folder_of(SOMEBODY)
    os.chown(folder_of(0, name="job/tls"), STRANGER, STRANGER)
    assert f"{job / 'tls'} belongs to another user" in told_somebody(make_ca, str(job))
    assert list((job / "tls").iterdir()) == []


def test_the_ca_of_a_job_is_not_written_by_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "tls").symlink_to("elsewhere")
    with pytest.raises(UsageError, match="tls is a symbolic link"):
        make_ca(str(tmp_path))
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o755


def test_a_folder_for_the_ca_that_others_could_read_is_made_private(tmp_path):
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls").chmod(0o777)
    make_ca(str(tmp_path))
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700


def launch_on_node(folder):
    sys.modules["ray"] = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"))
    process = RoleProcess(role="worker", master="10.0.0.2:1", index=0, access=Access("secret"))
    PlaceOnNode().launch(process, str(folder), "", "INFO", 1)


def test_an_actor_of_ray_uses_no_folder_of_another_user(told_somebody, folder_of):
    folder = folder_of(STRANGER)
    assert f"{folder} belongs to another user" in told_somebody(launch_on_node, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o2773])
def test_temporary_files_of_a_job_are_not_where_others_could_replace_them(tmp_path, mode):
    (tmp_path / "inner").mkdir()
    tmp_path.chmod(mode)
    for place in (tmp_path, tmp_path / "inner"):
        with pytest.raises(UsageError, match=rf"All users can write to {tmp_path} \(mode {mode:o}\)"):
            check_temporary(str(place))
    for closed in (0o1777, 0o755, 0o2775):
        tmp_path.chmod(closed)
        check_temporary(str(tmp_path / "inner"))


def test_a_link_leads_to_where_others_could_replace_temporary_files(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    with pytest.raises(UsageError, match=rf"{tmp_path}/open \(mode"):
        check_temporary(str(tmp_path / "link"))


@pytest.fixture
def place(monkeypatch):
    """An open folder for temporary files, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.parametrize("begin", ["sockets", "folder", "keys"])
def test_a_job_makes_nothing_where_others_could_replace_it(place, tmp_path, begin):
    tls = make_ca(str(tmp_path))
    makes = {
        "sockets": lambda: SocketFolder().host,
        "folder": ClusterProcesses(ClusterSettings(), None, "INFO").start,
        "keys": lambda: PlaceOnNode()._own_tls(tls),
    }
    with pytest.raises(UsageError, match="TMPDIR"):
        makes[begin]()
    assert list(place.iterdir()) == []
