"""Frames too large for one message: their arrays are sent in pieces, before the request or after the answer.

The frame has a key instead of the array (`InPieces`). The client sends the pieces before a request, and fetches them
after an answer, by calls of `Piece`, which every frame service has. If pieces are missing, the whole call is repeated.
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

LARGEST_FRAME = 256 << 20  # bytes of arrays above which a frame is sent in pieces
PIECE_BYTES = 32 << 20
_SMALL_BYTES = 64 << 10  # size of an array that stays in the frame
_KEY_BYTES = 16  # of a frame; an array's key has its number appended
_SILENT_SECONDS = 300.0  # after which pieces are discarded
PIECES_MISSING = grpc.StatusCode.ABORTED  # the server's code for this error

Call = Callable[[Frame[pb.PieceRequest]], Frame[pb.PieceResponse]]


class UnknownPiecesError(Exception):
    """A frame refers to arrays that are not here: the server was restarted, or they were already taken."""


def in_pieces(frame: Frame[Any], call: Callable[[Frame[Any]], Frame[Any]], call_piece: Call, fits: bool) -> Frame[Any]:
    """The answer to a call whose request, and answer, may have to be sent in pieces.

    Args:
        call: makes the call with a frame; raises `grpc.RpcError`, as does `call_piece`.
    """
    for last in (False, False, True):
        try:
            return _fetched_whole(call(frame if fits else _sent_ahead(frame, call_piece)), call_piece)
        except grpc.RpcError as error:
            if last or error.code() is not PIECES_MISSING:
                raise
    raise AssertionError("the last one returns or raises")


def _sent_ahead(frame: Frame[Any], call: Call) -> Frame[Any]:
    """`frame` without its larger arrays, after sending these."""
    tensors, larger = _without_larger(frame.tensors)
    for key, array in larger.items():
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, content.size, PIECE_BYTES):
            header = pb.PieceRequest(key=key, start=start, size=content.size)
            call(Frame(header, {"piece": content[start : start + PIECE_BYTES]}))
    return Frame(frame.header, tensors)


def _fetched_whole(frame: Frame[Any], call: Call) -> Frame[Any]:
    """`frame` with all its arrays."""
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
    """The frame with keys instead of larger arrays; and these arrays by key."""
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
    filled: dict[bytes, int] = field(default_factory=dict)  # bytes received


class Pieces:
    """The server's side: arrays of requests being received, and of answers not yet fetched."""

    def __init__(self) -> None:
        self._frames: dict[bytes, _Held] = {}
        self._lock = threading.Lock()

    def answer(self, frame: Frame[pb.PieceRequest]) -> Frame[Any]:
        """Handles `Piece`. Raises `WireError` for a piece that does not fit, `UnknownPiecesError` for a wrong key."""
        request, piece = frame.header, frame.tensors.get("piece")
        key, start = request.key, request.start
        with self._lock:
            if min(start, request.size, request.count) < 0:
                raise WireError(f"A piece starts at byte {start}, with {request.count} of {request.size} bytes.")
            if piece is None:
                return Frame(pb.PieceResponse(), {"piece": self._read(key, start, request.count)})
            end = start + piece.size
            if piece.dtype != np.uint8 or piece.ndim != 1 or end > request.size or len(key) <= _KEY_BYTES:
                raise WireError(
                    f"A piece of {piece.dtype} {list(piece.shape)} starts at byte {start} of {request.size}; expected "
                    "uint8 [n] that fits."
                )
            if start == 0:
                held = self._frames.setdefault(key[:_KEY_BYTES], _Held(time.monotonic()))
                held.arrays[key], held.filled[key] = _room(request.size), 0
            held = self._held(key)
            if start > held.filled[key] or held.arrays[key].size != request.size:
                raise UnknownPiecesError("Pieces are missing.")
            held.touched = time.monotonic()
            content = held.arrays[key]
        content[start:end] = piece  # a client sends pieces one after another
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
            raise UnknownPiecesError("An array sent in pieces is not here.")
        return held

    def forget_silent(self) -> None:
        """Discards pieces unused for a while; call it from time to time."""
        if not self._frames:
            return
        with self._lock:
            now = time.monotonic()
            for key, held in list(self._frames.items()):
                if now - held.touched > _SILENT_SECONDS:
                    del self._frames[key]

    def taken(self, frame: Frame[Any]) -> Frame[Any]:
        """A request with the arrays that were sent before it. Raises `UnknownPiecesError` when one is missing."""
        outlines: dict[str, Any] = {name: array for name, array in frame.tensors.items() if isinstance(array, InPieces)}
        if not outlines:
            return frame
        arrays: dict[str, Array] = {}
        with self._lock:
            for name, outline in outlines.items():
                held = self._held(outline.key)
                content = held.arrays[outline.key]
                if held.filled[outline.key] != content.size or content.size != outline.size:
                    raise UnknownPiecesError(f"The array {name!r} was not received completely.")
                arrays[name] = _whole(outline, content)
            for outline in outlines.values():
                self._frames.pop(outline.key[:_KEY_BYTES], None)
        return Frame(frame.header, {**frame.tensors, **arrays})

    def offered(self, frame: Frame[Any]) -> Frame[Any]:
        """An answer without its larger arrays, which can then be fetched."""
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
        raise WireError(f"Not enough memory for an array of {size:,} bytes.") from None


def bytes_of(frame: Frame[Any]) -> int:
    """The size of a frame's arrays."""
    return sum(array.nbytes for array in frame.tensors.values())
