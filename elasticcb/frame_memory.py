"""Frames whose arrays lie in memory that client and server share, if they are on one machine.

The client makes a segment when its frames are worth it, and shows it to the server (`Attach`); a server that can't see
it is on another machine, and frames travel whole as before. What doesn't fit travels whole too, and makes the next
segment larger. A call that failed may still run, so its segment is never used again.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

from elasticcb.errors import ConnectionLostError, WireError
from elasticcb.shared_memory import Segment, aligned_copy, is_supported, needed
from elasticcb.tensors import Frame, decode_header, encode_frame, encode_header, frame_decoder, has_arrays

logger = logging.getLogger(__name__)

_SMALLEST = 32 << 10  # bytes of arrays below which frames travel whole
_LARGEST = 1 << 30  # bytes of a half
_KEY_BYTES = 16


class UnknownSegmentError(WireError):
    """A frame names a segment that this server has not attached: it was started anew."""


class ClientMemory:
    """The client's side of one connection; one call at a time.

    Args:
        attach: sends a message to the server's `Attach`; raises `ConnectionLostError` when that may be there later, and
            another error when it refuses.
    """

    def __init__(self, attach: Callable[[bytes], Any]) -> None:
        self.lock = threading.Lock()
        self._attach = attach
        self._segment: Segment | None = None
        self._key = b""
        self._wanted = 0  # bytes of a half that the frames up to now would have needed
        self._usable = is_supported()

    def encode(self, frame: Frame[Any]) -> bytes:
        """The bytes to send for a request."""
        size = needed(frame.tensors.values())
        self._wanted = max(self._wanted, size)
        segment = self._usable_segment()
        if segment is None or size > segment.half:
            return encode_frame(frame)
        encoded, arrays = encode_header(frame)
        segment.write(arrays, answer=False)
        return encoded + self._key

    def decode(self, data: bytes, header_type: Callable[[], Any]) -> Frame[Any]:
        """The answer in the bytes that came."""
        if has_arrays(data) or self._segment is None:
            frame = frame_decoder(header_type)(data)
            self._wanted = max(self._wanted, needed(frame.tensors.values()))
            return frame
        segment = self._segment
        frame = decode_header(data, header_type, lambda offset, size: segment.read(offset, size, answer=True))
        # The next answer takes the same place.
        return Frame(frame.header, {name: aligned_copy(array) for name, array in frame.tensors.items()})

    def forget(self) -> None:
        """Begins with a new segment: the server may still write into this one, or does not know it."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _usable_segment(self) -> Segment | None:
        if self._segment is not None and self._segment.half < self._wanted <= _LARGEST:
            self.forget()
        if self._segment is None and self._usable and _SMALLEST <= self._wanted <= _LARGEST:
            self._make()
        return self._segment

    def _make(self) -> None:
        try:
            segment = Segment.create(self._wanted)
        except OSError as error:
            self._usable = False
            logger.warning("No memory to share with a server of this machine: %s. Tensors are sent, slower.", error)
            return
        key = secrets.token_bytes(_KEY_BYTES)
        try:
            self._attach(json.dumps({"path": segment.path, "half": segment.half, "key": key.hex()}).encode())
            self._segment, self._key = segment, key
        except ConnectionLostError:
            segment.close()  # the call that follows waits for the server
        except Exception as error:
            self._usable = False
            segment.close()
            logger.debug("The server does not share memory: %s", error)
        finally:
            segment.unlink()


class ServerMemory:
    """The server's side, of all its connections."""

    def __init__(self) -> None:
        self._segments: dict[bytes, Segment] = {}
        self._lock = threading.Lock()

    def attach(self, message: bytes) -> None:
        """Maps a client's segment. Raises `WireError` when that can't be."""
        try:
            given = json.loads(message)
            path, half, key = str(given["path"]), int(given["half"]), bytes.fromhex(given["key"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"A message to attach shared memory can't be read: {error}.") from error
        segment = Segment.attach(path, half)
        with self._lock:
            for old in [old for old, other in self._segments.items() if other.abandoned]:
                self._segments.pop(old).close()
            self._segments[key] = segment

    def decode(self, data: bytes, header_type: Callable[[], Any]) -> tuple[Frame[Any], Segment | None]:
        """The request in the bytes that came; its arrays may lie in the segment, and then last as long as the call.

        Raises `UnknownSegmentError` for a segment that is not attached.
        """
        if has_arrays(data):
            return frame_decoder(header_type)(data), None
        with self._lock:
            segment = self._segments.get(data[-_KEY_BYTES:])
        if segment is None:
            raise UnknownSegmentError("A frame names shared memory that is not attached.")
        return decode_header(data, header_type, lambda offset, size: segment.read(offset, size, answer=False)), segment

    @staticmethod
    def encode(frame: Frame[Any], segment: Segment | None) -> bytes:
        """The bytes to answer with, to a request that came by `segment`."""
        if segment is None or needed(frame.tensors.values()) > segment.half:
            return encode_frame(frame)
        encoded, arrays = encode_header(frame)
        segment.write(arrays, answer=True)
        return encoded
