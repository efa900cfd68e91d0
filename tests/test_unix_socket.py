"""Links between processes by Unix sockets: who gets one, and what they carry."""

import contextlib
import os
import socket
import struct
import threading
from types import SimpleNamespace

import pytest

from elasticcb.rpc.link import Message, ServerLinks
from elasticcb.rpc.shared_frames import Listener, connect

TOO_MANY = 2**40, 2**63, 2**64 - 1  # bytes: more than the memory, and than an array can have


def test_a_listener_takes_nobody_without_the_key():
    listener = Listener()
    strangers = []
    for shown in (b"x" * 16, b"short"):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(f"\0{listener.name}")
        stranger.sendall(shown)
        stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)
    key = b"k" * 16
    servers = ServerLinks(lambda method, request, memory: Message(request.data.upper()))
    connector = threading.Thread(target=lambda: servers.serve(connect(listener.name, key)))
    connector.start()
    link = listener.accept(key, lambda: True)
    connector.join()
    assert link.call("any", Message(b"abc"), 10.0).data == b"ABC"
    for each in (*strangers, link, listener):
        each.close()
    servers.stop(1.0)


@pytest.mark.parametrize("announced", [(size, 0) for size in TOO_MANY] + [(25, size) for size in TOO_MANY])
def test_a_link_by_which_too_many_bytes_are_announced_ends_without_a_traceback(announced, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    listener, ended = Listener(), threading.Event()
    servers = ServerLinks(lambda method, request, memory: request)
    servers.serve(connect(listener.name, b"k" * 16), SimpleNamespace(close=ended.set))
    link = listener.accept(b"k" * 16, lambda: True)
    link._socket.sendall(struct.pack("<QQB", *announced, 4) + b"Echo, and what is not as much")
    link._socket.shutdown(socket.SHUT_WR)
    assert ended.wait(10)
    assert not raised
    listener.close()
    link.close()


def connect_as_another_user(name, key, pipe):
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        with contextlib.suppress(OSError):
            connection.sendall(key)
        pipe.send("connected")
        answer = b""
        with contextlib.suppress(OSError):  # it was reset
            answer = connection.recv(1)
        pipe.send(answer)


def listen_as_another_user(name, pipe):
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        pipe.send("listening")
        connected, _ = listening.accept()
        pipe.send(connected.recv(16))


def test_another_user_who_knows_name_and_key_gets_no_link(another_user, monkeypatch):
    monkeypatch.setattr("elasticcb.rpc.shared_frames._HANDSHAKE_SECONDS", 0.5)
    listener, key = Listener(), b"k" * 16
    pipe = another_user(connect_as_another_user, listener.name, key)
    assert pipe.recv() == "connected"
    with pytest.raises(TimeoutError):
        listener.accept(key, lambda: True)
    assert pipe.recv() == b""
    listener.close()


def test_a_server_tells_no_key_to_a_listener_of_another_user(another_user):
    pipe = another_user(listen_as_another_user, "elasticcb-of-a-stranger")
    assert pipe.recv() == "listening"
    with pytest.raises(OSError, match="another user"):
        connect("elasticcb-of-a-stranger", b"k" * 16)
    assert pipe.recv() == b""
