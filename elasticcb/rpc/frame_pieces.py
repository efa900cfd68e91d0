"""Frames that are too large for one message: their arrays go in pieces, before the request or after the answer.

In the frame itself stands a key instead of the array (`InPieces`). Before a request the client sends the pieces by
calls of `Piece`, which every service of frames has, and after an answer it asks for them by such calls. Who asks for
what is not there any more, or not yet, is told to make the whole call again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, Frame, InPieces, aligned

LARGEST_FRAME = 256 << 20  # bytes of arrays, above which a frame goes in pieces
PIECE_BYTES = 32 << 20
_SMALL_BYTES = 64 << 10  # of an array that stays in the frame
_KEY_BYTES = 16  # of a frame; an array's has its number behind it
_SILENT_SECONDS = 300.0  # after which nobody will ask for the rest
PIECES_MISSING = grpc.StatusCode.ABORTED  # by which a server says so

Call = Callable[[Frame[pb.PieceRequest]], Frame[pb.PieceResponse]]


class UnknownPiecesError(Exception):
    """A frame names arrays that are not here: this server was started anew, or they have been taken already."""


def in_pieces(frame: Frame[Any], call: Callable[[Frame[Any]], Frame[Any]], call_piece: Call, fits: bool) -> Frame[Any]:
    """The answer to a call whose request may have to go in pieces, as may the answer.

    Args:
        call: makes the call with a frame; raises `grpc.RpcError`, as does `call_piece`.
        fits: the request needs no pieces.
    """
    for last in (False, False, True):
        try:
            return _fetched_whole(call(frame if fits else _sent_ahead(frame, call_piece)), call_piece)
        except grpc.RpcError as error:
            if last or error.code() is not PIECES_MISSING:
                raise
    raise AssertionError("the last one returns or raises")


def _sent_ahead(frame: Frame[Any], call: Call) -> Frame[Any]:
    """`frame` without its larger arrays, after these have been sent."""
    tensors, larger = _without_larger(frame.tensors)
    for key, array in larger.items():
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, content.size, PIECE_BYTES):
            header = pb.PieceRequest(key=key, start=start, size=content.size)
            call(Frame(header, {"piece": content[start : start + PIECE_BYTES]}))
    return Frame(frame.header, tensors)


def _fetched_whole(frame: Frame[Any], call: Call) -> Frame[Any]:
    """`frame` with all of its arrays."""
    if not any(isinstance(array, InPieces) for array in frame.tensors.values()):
        return frame
    return Frame(frame.header, {name: _fetched(array, call) for name, array in frame.tensors.items()})


def _fetched(array: Array | InPieces, call: Call) -> Array:
    if not isinstance(array, InPieces):
        return array
    content = aligned((array.size,), np.uint8)
    for start in range(0, array.size, PIECE_BYTES):
        header = pb.PieceRequest(key=array.key, start=start, count=PIECE_BYTES)
        piece = call(Frame(header, {})).tensors["piece"]
        content[start : start + piece.size] = piece
    return _whole(array, content)


def _without_larger(tensors: Mapping[str, Array]) -> tuple[dict[str, Any], dict[bytes, Array]]:
    """What stays in a frame, with keys in the place of larger arrays; and these by key."""
    frame_key = secrets.token_bytes(_KEY_BYTES)
    staying: dict[str, Any] = dict(tensors)
    larger: dict[bytes, Array] = {}
    for number, (name, array) in enumerate(tensors.items()):
        if array.nbytes > _SMALL_BYTES:
            key = frame_key + number.to_bytes(4, "little")
            larger[key] = array
            staying[name] = InPieces(key, array.dtype, array.shape)
    return staying, larger


def _whole(outline: InPieces, content: Array) -> Array:
    array: Array = content.view(outline.dtype).reshape(outline.shape)
    array.flags.writeable = False
    return array


@dataclass
class _Held:
    """Arrays of one frame, as bytes, by key."""

    touched: float
    arrays: dict[bytes, Array] = field(default_factory=dict)
    filled: dict[bytes, int] = field(default_factory=dict)  # bytes that are there


class Pieces:
    """The server's side: arrays of requests that are to come, and of answers that have not been fetched."""

    def __init__(self) -> None:
        self._frames: dict[bytes, _Held] = {}
        self._lock = threading.Lock()

    def answer(self, frame: Frame[pb.PieceRequest]) -> Frame[Any]:
        """Of `Piece`. Raises `WireError` for a piece that does not fit, `UnknownPiecesError` for one of nothing."""
        request, piece = frame.header, frame.tensors.get("piece")
        key, start = request.key, request.start
        with self._lock:
            if min(start, request.size, request.count) < 0:
                raise WireError(f"A piece begins at byte {start}, with {request.count} of {request.size} bytes.")
            if piece is None:
                return Frame(pb.PieceResponse(), {"piece": self._read(key, start, request.count)})
            end = start + piece.size
            if piece.dtype != np.uint8 or piece.ndim != 1 or end > request.size or len(key) <= _KEY_BYTES:
                raise WireError(
                    f"A piece of {piece.dtype} {list(piece.shape)} begins at byte {start} of {request.size}; uint8 [n] "
                    "that fits was expected."
                )
            if start == 0:
                held = self._frames.setdefault(key[:_KEY_BYTES], _Held(time.monotonic()))
                held.arrays[key], held.filled[key] = _room(request.size), 0
            held = self._held(key)
            if start > held.filled[key] or held.arrays[key].size != request.size:
                raise UnknownPiecesError("Pieces are missing.")
            held.touched = time.monotonic()
            content = held.arrays[key]
        content[start:end] = piece  # one client sends one piece after another
        held.filled[key] = max(end, held.filled[key])
        return Frame(pb.PieceResponse(), {})

    def _read(self, key: bytes, start: int, count: int) -> Array:
        held = self._held(key)
        held.touched = time.monotonic()
        content = held.arrays[key]
        piece = content[start : start + count]
        if start + count >= content.size:
            del held.arrays[key]
        if not held.arrays:
            del self._frames[key[:_KEY_BYTES]]
        return piece

    def _held(self, key: bytes) -> _Held:
        held = self._frames.get(key[:_KEY_BYTES])
        if held is None or key not in held.arrays:
            raise UnknownPiecesError("An array that goes in pieces is not here.")
        return held

    def forget_silent(self) -> None:
        """Forgets what nobody has sent or asked for any more for a while; to be called from time to time."""
        if not self._frames:
            return
        with self._lock:
            now = time.monotonic()
            for key, held in list(self._frames.items()):
                if now - held.touched > _SILENT_SECONDS:
                    del self._frames[key]

    def taken(self, frame: Frame[Any]) -> Frame[Any]:
        """A request with the arrays that were sent ahead of it. Raises `UnknownPiecesError` where one is missing."""
        outlines: dict[str, Any] = {name: array for name, array in frame.tensors.items() if isinstance(array, InPieces)}
        if not outlines:
            return frame
        arrays: dict[str, Array] = {}
        with self._lock:
            for name, outline in outlines.items():
                held = self._held(outline.key)
                content = held.arrays[outline.key]
                if held.filled[outline.key] != content.size or content.size != outline.size:
                    raise UnknownPiecesError(f"The array {name!r} has not come whole.")
                arrays[name] = _whole(outline, content)
            for outline in outlines.values():
                self._frames.pop(outline.key[:_KEY_BYTES], None)
        return Frame(frame.header, {**frame.tensors, **arrays})

    def offered(self, frame: Frame[Any]) -> Frame[Any]:
        """An answer without its larger arrays, which can be asked for from now on."""
        tensors, larger = _without_larger(frame.tensors)
        with self._lock:
            for key, array in larger.items():
                held = self._frames.setdefault(key[:_KEY_BYTES], _Held(time.monotonic()))
                held.arrays[key] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return Frame(frame.header, tensors)


def _room(size: int) -> Array:
    try:
        return aligned((size,), np.uint8)
    except (MemoryError, ValueError, OverflowError):
        raise WireError(f"There is no memory for an array of {size:,} bytes.") from None


def bytes_of(frame: Frame[Any]) -> int:
    """What the arrays of a frame take."""
    return sum(array.nbytes for array in frame.tensors.values())
