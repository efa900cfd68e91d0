"""Calls over links, beside gRPC: what they answer, also where there can be no link."""

import threading

import numpy as np
import pytest
from echo_server import ECHO, ask, link_of, link_threads

from elasticcb.errors import ConnectionLostError, ModelFileError
from elasticcb.rpc import shared_frames
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.stream import ClientStream
from elasticcb.security.credentials import Access


def test_calls_go_by_the_link_from_the_first_one_on(serve_and_connect_by_link, monkeypatch):
    _, connection = serve_and_connect_by_link(token="secret")
    assert ask(connection, 3).header.version == 3
    assert link_of(connection) is not None
    used = []
    inner = link_of(connection).call
    monkeypatch.setattr(link_of(connection), "call", lambda *args: used.append(args[0]) or inner(*args))
    np.testing.assert_array_equal(ask(connection, a=np.arange(5)).tensors["a"], np.arange(5))
    assert used == ["Echo"]


def test_arrays_of_all_sizes_travel_by_links(serve_and_connect_by_link):
    _, connection = serve_and_connect_by_link()
    for count in (0, 1, 7, 16_000, 70_000, 3, 900_000, 20_000):
        sent = {str(size): np.arange(size, dtype=kind) for size, kind in ((count, "int64"), (count // 3, "uint8"))}
        sent |= {"transposed": np.arange(6.0).reshape(2, 3).T, "scalar": np.float32(3.0), "flags": np.array([True])}
        answer = ask(connection, count, **sent).tensors
        assert list(answer) == list(sent)
        for name, array in sent.items():
            np.testing.assert_array_equal(answer[name], array, strict=True)
            assert answer[name].ctypes.data % 16 == 0 or not answer[name].size


def test_a_client_without_the_token_gets_no_link(serve_and_connect):
    server, _ = serve_and_connect(token="secret")
    stranger = Connection(server.address, "the echo server", 0.2, Access("wrong"))
    with pytest.raises(ConnectionLostError, match="UNAUTHENTICATED"):
        ask(stranger)
    assert link_of(stranger) is None
    assert link_threads() == []
    stranger.close()


def fail(request):
    raise ModelFileError("the optimizer failed", "line 7 of their file: ä")


def test_an_error_keeps_its_class_its_text_and_the_users_traceback(serve_and_connect_by_link):
    _, connection = serve_and_connect_by_link(fail)
    for _ in range(2):
        with pytest.raises(ModelFileError, match=r"^the optimizer failed$") as caught:
            ask(connection)
        assert caught.value.user_traceback == "line 7 of their file: ä"
    assert link_of(connection) is not None  # the call is over: nothing has to begin anew


def test_calls_go_as_between_machines_where_the_server_can_not_connect(serve_and_connect, monkeypatch):
    def refused(*args):
        raise ConnectionRefusedError

    monkeypatch.setattr(shared_frames, "connect", refused)
    _, connection = serve_and_connect()
    for value in (1.0, 2.0, 3.0):  # the first by gRPC
        np.testing.assert_array_equal(ask(connection, a=np.full(50_000, value)).tensors["a"], value)
    assert isinstance(connection.transport_of(ECHO).side, ClientStream)


def test_threads_that_share_a_connection_get_their_own_answers(serve_and_connect_by_link):
    _, connection = serve_and_connect_by_link()
    wrong = []

    def work(number):
        for turn in range(50):
            answer = ask(connection, 100 * number + turn, a=np.full(1_000, number))
            if answer.header.version != 100 * number + turn or not (answer.tensors["a"] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_answer_that_is_kept_is_not_overwritten_and_others_come_all_the_same(serve_and_connect_by_link):
    _, connection = serve_and_connect_by_link()
    answers = [ask(connection, a=np.full(100_000, float(value))).tensors["a"] for value in range(6)]
    for value, answer in enumerate(answers):
        assert (answer == value).all()


def test_who_keeps_an_answer_for_long_leaves_a_place_for_the_next_ones(serve_and_connect, monkeypatch):
    _, connection = serve_and_connect()
    ask(connection, a=np.zeros(100_000))  # makes the segment large enough
    link = connection.transport_of(ECHO).side.link
    whole, call = [], link.call
    monkeypatch.setattr(link, "call", lambda *args: whole.append(bool((answer := call(*args)).arrays)) or answer)
    kept = ask(connection, a=np.full(100_000, -1.0)).tensors["a"]
    last = None
    for value in range(8):  # the last answer is used while the next one comes
        last = ask(connection, a=np.full(100_000, float(value))).tensors["a"]
        assert (last == value).all()
    assert (kept == -1).all()
    assert sum(whole) <= 1  # the one that showed that places are scarce


def test_an_answer_that_is_let_go_of_gives_its_memory_to_a_later_one(serve_and_connect):
    _, connection = serve_and_connect()
    places = set()
    for value in range(9):
        answer = ask(connection, a=np.full(100_000, float(value))).tensors["a"]
        if value > 2:
            places.add(answer.ctypes.data)
    assert len(places) == 2
