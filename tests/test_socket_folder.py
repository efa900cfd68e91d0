"""Folders of Unix sockets: who can listen in them, and what becomes of them."""

import multiprocessing
import os
import socket
import stat
from pathlib import Path

import pytest
from echo_server import ask, start_server

from elasticcb.errors import ConnectionLostError, UsageError
from elasticcb.rpc.connection import Connection
from elasticcb.security.credentials import Access, is_loopback
from elasticcb.security.socket_folder import (
    SocketFolder,
    abandoned_folders,
    address_of,
    hold_folder,
    host_of,
    port_of,
    remove_folder,
    why_unsafe,
)


@pytest.fixture
def folder():
    folder = SocketFolder()
    yield folder
    folder.remove()


def path_of(folder):
    return Path(folder.host.removeprefix("unix:"))


def serve(folder, port=0):
    return start_server(host=folder.host, port=port, access=Access("secret"))


def call(address, patience=0.5):
    connection = Connection(address, "the server", patience, Access("secret"))
    try:
        return ask(connection, 7).header.version
    finally:
        connection.close()


def test_only_its_user_can_enter_a_folder_and_a_link_is_none(folder, tmp_path):
    assert stat.S_IMODE(path_of(folder).stat().st_mode) == 0o700
    assert why_unsafe(folder.host) == ""
    assert is_loopback(folder.host)
    link = tmp_path / "link"
    link.symlink_to(path_of(folder))
    assert why_unsafe(f"unix:{link}")
    assert "is not a folder" in why_unsafe("unix:/tmp/a\0b")


def test_servers_answer_in_a_folder_each_at_a_number_of_its_own(folder):
    servers = [serve(folder) for _ in range(3)]
    assert len({server.address for server in servers}) == 3
    for server in servers:
        assert host_of(server.address) == folder.host
        assert address_of(folder.host, port_of(server.address)) == server.address
        assert call(server.address) == 7
        server.stop()
    assert list(path_of(folder).iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 100, "a%20b", "a b", "ä"])
def test_a_folder_has_an_address_whatever_the_path_for_temporary_files(folder, tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    server = serve(folder)
    assert not server.address.startswith(f"unix:{tmp_path}")
    assert call(server.address) == 7
    server.stop()


def test_a_number_at_which_a_process_listens_is_taken(folder):
    server = serve(folder)
    with pytest.raises(UsageError, match="another process listens there"):
        serve(folder, server.port)
    assert call(server.address) == 7
    server.stop()


def test_a_server_takes_the_place_of_one_that_is_gone(folder):
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path_of(folder) / "17"))
        gone.listen()
    server = serve(folder, 17)
    assert server.address == f"{folder.host}/17"
    assert call(server.address) == 7
    server.stop()


def test_nobody_listens_in_a_folder_that_others_can_enter(folder):
    path_of(folder).chmod(0o755)
    with pytest.raises(UsageError, match=r"Can't listen on .* only the user of this process can enter"):
        serve(folder)
    path_of(folder).chmod(0o700)


def test_nothing_is_sent_into_a_folder_that_others_can_enter(folder):
    server = serve(folder)
    path_of(folder).chmod(0o711)
    with pytest.raises(ConnectionLostError, match="only the user of this process can enter"):
        call(server.address)
    path_of(folder).chmod(0o700)
    assert call(server.address) == 7
    server.stop()


def test_a_connection_to_a_folder_that_is_gone_is_lost(folder):
    server = serve(folder)
    connection = Connection(server.address, "the server", 0.2, Access("secret"))
    assert ask(connection, 7).header.version == 7
    server.stop()
    folder.remove()
    with pytest.raises(ConnectionLostError, match="is gone"):
        ask(connection)
    connection.close()


def test_only_what_was_made_for_sockets_is_removed(tmp_path, folder):
    other = tmp_path / "other"
    other.mkdir(0o700)
    remove_folder(f"unix:{other}")
    remove_folder("127.0.0.1")
    remove_folder("")
    assert other.is_dir()
    file = path_of(folder) / "file"
    file.touch()
    remove_folder(folder.host)
    assert file.exists()
    file.unlink()
    remove_folder(folder.host)
    assert not path_of(folder).exists()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where temporary files go, for this test only."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def found_abandoned(place):
    return [each for each in abandoned_folders() if each.parent == place]


def of_killed_job(place, name="elasticcb-sockets-a"):
    folder = place / name
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(folder / "17"))
    os.utime(folder, (0, 0))
    return folder


def hold_and_wait(host, pipe):
    hold_folder(host)
    pipe.send("held")
    pipe.recv()


def test_a_folder_is_not_abandoned_while_one_process_of_its_job_lives(place):
    folder = of_killed_job(place)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=hold_and_wait, args=(f"unix:{folder}", other))
    process.start()
    assert pipe.recv() == "held"
    assert found_abandoned(place) == []
    process.kill()
    process.join()
    assert found_abandoned(place) == [folder]


def test_a_folder_that_is_made_is_held_until_it_is_removed(place):
    made = SocketFolder()
    os.utime(path_of(made), (0, 0))
    taken_over = SocketFolder(f"{made.host}/17")
    assert found_abandoned(place) == []
    made.remove()
    assert list(place.iterdir()) == []
    taken_over.remove()


def test_only_old_folders_of_this_user_alone_are_abandoned(place):
    of_killed_job(place, "other")
    of_killed_job(place, "elasticcb-sockets-open").chmod(0o755)
    os.utime(of_killed_job(place, "elasticcb-sockets-young"))
    folder = of_killed_job(place)
    (place / "elasticcb-sockets-link").symlink_to(folder)
    if os.getuid() == 0:
        os.chown(of_killed_job(place, "elasticcb-sockets-theirs"), 65534, 65534)
    assert found_abandoned(place) == [folder]


def listen_as_another_user(path, pipe):
    os.setgid(65534)
    os.setuid(65534)
    try:
        os.unlink(path)
    except OSError as error:
        pipe.send(type(error))
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
    except OSError as error:
        pipe.send(type(error))
    else:
        pipe.send("bound")


def test_another_user_can_not_listen_in_the_place_of_a_server_that_is_gone(folder):
    if os.getuid():
        pytest.skip("only root can become another user")
    path = str(path_of(folder) / "17")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(path)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=listen_as_another_user, args=(path, other))
    process.start()
    assert [pipe.recv(), pipe.recv()] == [PermissionError, PermissionError]
    process.join()
