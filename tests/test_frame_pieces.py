"""Frames whose arrays go in pieces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from echo_server import ECHO, ask

from elasticcb.errors import ConnectionLostError, ElasticCBError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import frame_pieces, shared_frames
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_pieces import Pieces, UnknownPiecesError
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import Server
from elasticcb.rpc.tensors import Frame

METHOD = replace(ECHO, transient=True)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(frame_pieces, "LARGEST_FRAME", 100_000)
    monkeypatch.setattr(frame_pieces, "PIECE_BYTES", 30_000)
    monkeypatch.setattr(frame_pieces, "_SMALL_BYTES", 1_000)
    monkeypatch.setattr(shared_frames, "_LARGEST", 150_000)


class Echo:
    """A server and a client of it, which counts the calls of each kind that reach the server."""

    def __init__(self, function, kind):
        self.function, self.requests = function, []
        self.service = FrameService({METHOD: self._answer})
        self._pieces = self.service._pieces
        answer = self._pieces.answer
        self.pieces = 0

        def counted(frame):
            self.pieces += 1
            return answer(frame)

        self.service._handlers[METHOD.piece] = counted
        self.server = Server()
        self.server.add(self.service)
        self.server.start()
        self.connection = Connection(self.server.address, "the echo server", 5.0)
        self._method = replace(METHOD, shared=kind != "plain", often=kind == "often")

    def _answer(self, frame):
        self.requests.append(frame)
        return self.function(frame)

    def call(self, tensors):
        return ask(self.connection, method=self._method, **tensors).tensors

    def close(self):
        self.connection.close()
        self.server.stop()


@pytest.fixture(params=["plain", "shared", "often"])
def start(request):
    opened = []

    def make(function):
        opened.append(Echo(function, request.param))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def arrays(size):
    return {
        "flat": RNG.normal(size=size),
        "rows": RNG.integers(0, 9, (size // 7, 7), np.int64),
        "every other": RNG.normal(size=2 * size).astype(np.float32)[::2],
        "flags": RNG.integers(0, 2, size).astype(bool),
        "small": np.arange(3.0),
        "number": np.array(7, np.int32),
        "none": np.zeros((0, 5)),
    }


def assert_same(found, sent):
    assert list(found) == list(sent)
    for name, array in sent.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_frames_of_any_size_go_there_and_back(start):
    echo = start(lambda frame: Frame(pb.ExchangeResponse(), dict(frame.tensors)))
    for size, in_pieces in ((10, False), (30_000, True), (1_000, False), (5_000, True), (100_000, True)):
        before, sent = echo.pieces, arrays(size)
        assert_same(echo.call(sent), sent)
        if in_pieces and size > 10_000:
            assert echo.pieces > before + 20
        elif not in_pieces:
            assert echo.pieces == before
    assert not echo._pieces._frames


def test_an_answer_alone_is_large(start):
    sent = arrays(20_000)
    echo = start(lambda frame: Frame(pb.ExchangeResponse(), sent))
    for _ in range(3):
        assert_same(echo.call({}), sent)
    assert not echo._pieces._frames


def test_request_whose_pieces_are_gone_is_sent_again(start):
    echo = start(lambda frame: Frame(pb.ExchangeResponse(), dict(frame.tensors)))
    sent, answer = arrays(20_000), echo._pieces.answer
    assert_same(echo.call(sent), sent)
    undisturbed, echo.pieces = echo.pieces, 0
    echo.requests.clear()
    lost = []

    def losing(frame):
        response = answer(frame)
        if echo.pieces == 5 and not lost:
            lost.append(dict(echo._pieces._frames))
            echo._pieces._frames.clear()  # as when the server was started anew
        return response

    def counted(frame):
        echo.pieces += 1
        return losing(frame)

    echo.service._handlers[METHOD.piece] = counted
    assert_same(echo.call(sent), sent)
    assert lost
    assert echo.pieces == 6 + undisturbed  # the sixth was refused
    assert len(echo.requests) == 1


def test_answer_whose_pieces_are_gone_is_asked_for_again(start):
    sent = arrays(20_000)
    echo = start(lambda frame: Frame(pb.ExchangeResponse(), sent))
    offered = echo._pieces.offered

    def offer_once(frame):
        response = offered(frame)
        if len(echo.requests) == 1:
            echo._pieces._frames.clear()
        return response

    echo._pieces.offered = offer_once
    assert_same(echo.call({}), sent)
    assert len(echo.requests) == 2


def test_error_of_a_call_with_pieces_is_the_servers_own(start):
    def fail(frame):
        raise ElasticCBError("no room")

    echo = start(fail)
    with pytest.raises(ElasticCBError, match="no room"):
        echo.call(arrays(20_000))
    assert not echo._pieces._frames


def test_server_that_is_gone_is_named(start):
    echo = start(lambda frame: Frame(pb.ExchangeResponse(), {}))
    echo.connection._patience = 0.2
    echo.server.stop(0)
    with pytest.raises(ConnectionLostError, match="the echo server"):
        echo.call(arrays(20_000))


def piece(key=b"k" * 20, start=0, size=100, count=0, content=None):
    tensors = {} if content is None else {"piece": content}
    return Frame(pb.PieceRequest(key=key, start=start, size=size, count=count), tensors)


@pytest.mark.parametrize(
    "wrong",
    [
        piece(content=np.zeros(101, np.uint8)),
        piece(content=np.zeros(10)),
        piece(content=np.zeros((2, 2), np.uint8)),
        piece(key=b"short", content=np.zeros(1, np.uint8)),
        piece(start=2**62, content=np.zeros(10, np.uint8)),
        piece(start=-1, content=np.zeros(10, np.uint8)),
        piece(start=0, count=-1),
        piece(size=2**62, content=np.zeros(10, np.uint8)),
    ],
)
def test_pieces_that_do_not_fit_are_refused(wrong):
    with pytest.raises(WireError):
        Pieces().answer(wrong)


def test_pieces_with_a_gap_are_not_taken_for_a_whole():
    pieces = Pieces()
    pieces.answer(piece(content=np.zeros(10, np.uint8)))
    pieces.answer(piece(content=np.zeros(10, np.uint8)))  # again
    with pytest.raises(UnknownPiecesError):
        pieces.answer(piece(start=20, content=np.zeros(10, np.uint8)))
    with pytest.raises(UnknownPiecesError):
        pieces.answer(piece(key=b"x" * 20, start=10, content=np.zeros(10, np.uint8)))
    with pytest.raises(UnknownPiecesError):
        pieces.answer(piece(key=b"x" * 20, count=10))
    outline = frame_pieces.InPieces(b"k" * 20, np.dtype(np.uint8), (100,))
    with pytest.raises(UnknownPiecesError, match="completely"):
        pieces.taken(Frame(pb.ExchangeRequest(), {"a": outline}))


def test_pieces_that_nobody_asks_for_any_more_are_forgotten(monkeypatch):
    pieces = Pieces()
    pieces.answer(piece(content=np.zeros(10, np.uint8)))
    pieces.offered(Frame(pb.ExchangeResponse(), {"a": np.zeros(10_000)}))
    assert len(pieces._frames) == 2
    pieces.forget_silent()
    assert len(pieces._frames) == 2
    monkeypatch.setattr(frame_pieces, "_SILENT_SECONDS", -1.0)
    pieces.forget_silent()
    assert not pieces._frames


def test_any_call_frees_what_a_lost_client_has_left(start, monkeypatch):
    echo = start(lambda frame: Frame(pb.ExchangeResponse(), {}))
    echo._pieces.offered(Frame(pb.ExchangeResponse(), {"a": np.zeros(10_000)}))
    echo.call({})
    assert echo._pieces._frames
    monkeypatch.setattr(frame_pieces, "_SILENT_SECONDS", -1.0)
    echo.call({})
    assert not echo._pieces._frames
