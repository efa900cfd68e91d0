"""Arrays on the wire.

`to_message` and `from_message` store small arrays inside protobuf messages. Frames carry large ones: a protobuf header
whose `tensors` field describes arrays, followed by their raw bytes, so that nothing is encoded and a received array is
a view of the received message (docs/wire_protocol.md).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb

Array = npt.NDArray[Any]
Header = TypeVar("Header")

_PREFIX = struct.Struct("<4sI")  # magic number, bytes of the header
_MAGIC = b"ECB1"
_MAGIC_OF_HEADER = b"ECBH"  # a frame without its arrays
SHARED_ALIGNMENT = 64  # of each array in shared memory: TensorFlow then needs no copy
_ALIGNMENT = 16  # of each array within a frame: enough for every dtype and for vector loads

# Supported dtypes, by NumPy name. bfloat16 and the float8 types are registered by ml_dtypes, a dependency of
# TensorFlow.
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip


@functools.lru_cache
def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype called `name`. Raises `WireError` for an unsupported one."""
    if name not in _DTYPES:
        raise WireError(f"A tensor has unsupported dtype {name!r}; supported: {', '.join(_DTYPES)}.")
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


@functools.lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # which NumPy builds each time


def to_message(array: Array, name: str = "") -> pb.Tensor:
    """`array` of any shape and a numeric, boolean or bytes dtype, as a protobuf message."""
    if array.dtype.kind in "OSU":
        return _strings_to_message(array, name)
    dtype_of(array.dtype.name)
    return pb.Tensor(dtype=array.dtype.name, shape=array.shape, content=array.tobytes(), name=name)


def from_message(message: pb.Tensor) -> Array:
    """The array in `message`, read-only. Raises `WireError` when size and shape disagree."""
    if message.dtype == "bytes":
        return _strings_from_message(message)
    return _view(memoryview(message.content), _outline_of(message), message.name)


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike, zeros: bool = False) -> Array:
    """An array whose memory TensorFlow can use without a copy.

    Args:
        zeros: its elements are 0; the memory is not touched.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = (np.zeros if zeros else np.empty)(size + SHARED_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % SHARED_ALIGNMENT
    array: Array = memory[start : start + size].view(kind).reshape(shape)
    return array


def all_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite."""
    if array.dtype.kind in "iub":
        return True
    if array.dtype in (np.float32, np.float64):
        flat = array.reshape(-1)
        # One pass at memory speed. If the sum of squares overflows, elements are checked one by one.
        with np.errstate(over="ignore", invalid="ignore"):
            if math.isfinite(np.dot(flat, flat)):
                return True
    return bool(np.isfinite(array).all())


class InPieces(NamedTuple):
    """Placeholder in a frame for an array that is sent in pieces (elasticcb/rpc/frame_pieces.py), with its key."""

    key: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the frame."""
        return 0


@dataclass(frozen=True)
class Frame(Generic[Header]):
    """A header and its arrays, by name."""

    header: Header
    tensors: Mapping[str, Array]


def encode_frame(frame: Frame[Any]) -> bytes:
    """The bytes of `frame`. Sets the `tensors` field of its header."""
    encoded, arrays = _described(frame)
    pieces: list[Any] = [_PREFIX.pack(_MAGIC, len(encoded)), encoded]
    size = _PREFIX.size + len(encoded)
    for array in arrays:
        padding = -size % _ALIGNMENT
        pieces += [b"\0" * padding, array.reshape(-1).view(np.uint8).data]
        size += padding + array.nbytes
    return b"".join(pieces)


def encode_header(frame: Frame[Any]) -> tuple[bytes, list[Array]]:
    """The bytes of `frame` without its arrays, and these arrays, which are transferred separately."""
    encoded, arrays = _described(frame)
    return _PREFIX.pack(_MAGIC_OF_HEADER, len(encoded)) + encoded, arrays


def has_arrays(data: bytes) -> bool:
    """Whether the bytes of a frame contain its arrays: made by `encode_frame`, not `encode_header`."""
    return data[:4] != _MAGIC_OF_HEADER


def decode_header(data: bytes, header_type: type[Header], read: Callable[[int, int], Any]) -> Frame[Header]:
    """The frame whose `encode_header` is `data`; `read(offset, size)` returns the bytes of its arrays, which are stored
    consecutively at multiples of `SHARED_ALIGNMENT`. Raises `WireError` like `decode_frame`."""
    header, _ = _header_of(data, header_type, _MAGIC_OF_HEADER)
    return Frame(header, _tensors_of(header, 0, SHARED_ALIGNMENT, read))


def _described(frame: Frame[Any]) -> tuple[bytes, list[Array]]:
    header = frame.header
    del header.tensors[:]
    arrays = []
    for name, array in frame.tensors.items():
        if isinstance(array, InPieces):
            header.tensors.add(dtype=_name_of(array.dtype), shape=array.shape, name=name, pieces=array.key)
            continue
        array = np.asarray(array, order="C")
        header.tensors.add(dtype=_name_of(array.dtype), shape=array.shape, name=name)
        arrays.append(array)
    return header.SerializeToString(), arrays


def _header_of(data: bytes, header_type: type[Any], expected: bytes) -> tuple[Any, int]:
    """A frame's header, and where it ends."""
    header = header_type()
    try:
        magic, header_size = _PREFIX.unpack_from(data)
        position = _PREFIX.size + header_size
        if magic != expected or position > len(data):
            raise ValueError("no frame prefix")
        header.ParseFromString(data[_PREFIX.size : position])
    except Exception as error:
        raise WireError(
            f"A message of {len(data)} bytes is not a {type(header).__name__} frame ({error}). All processes of a job "
            "must run the same release of elasticcb."
        ) from error
    return header, position


def decode_frame(data: bytes, header_type: type[Header]) -> Frame[Header]:
    """The frame whose `encode_frame` is `data`; arrays are read-only views of the bytes.

    Raises `WireError` for anything that is not a complete frame with this header.
    """
    header, position = _header_of(data, header_type, _MAGIC)
    body = memoryview(data)
    return Frame(header, _tensors_of(header, position, _ALIGNMENT, lambda offset, size: body[offset : offset + size]))


def _tensors_of(header: Any, position: int, alignment: int, read: Callable[[int, int], Any]) -> dict[str, Array]:
    """The arrays that a header describes, stored one after another from `position` on, each at the next multiple of
    `alignment`; `read(offset, size)` returns their bytes."""
    tensors: dict[str, Array] = {}
    for description in header.tensors:
        outline = _outline_of(description)
        if outline.key:
            tensors[description.name] = outline  # type: ignore[assignment]
            continue
        position += -position % alignment
        tensors[description.name] = _view(read(position, outline.size), outline, description.name)
        position += outline.size
    return tensors


def _outline_of(message: pb.Tensor) -> InPieces:
    """The declared dtype and shape of an array; its key is empty if it is not sent in pieces."""
    shape = tuple(message.shape)
    if shape and min(shape) < 0:
        raise WireError(f"Tensor {message.name!r} has the shape {list(shape)}, with a negative size.")
    return InPieces(message.pieces, dtype_of(message.dtype), shape)


def _view(content: memoryview, outline: InPieces, name: str) -> Array:
    if len(content) != outline.size:
        raise WireError(
            f"Tensor {name!r} is declared as {_name_of(outline.dtype)}{list(outline.shape)}, which takes "
            f"{outline.size} bytes, but {len(content)} were received."
        )
    array: Array = np.frombuffer(content, outline.dtype).reshape(outline.shape)
    array.flags.writeable = False
    return array


def _strings_to_message(array: Array, name: str) -> pb.Tensor:
    values = [v if isinstance(v, bytes) else str(v).encode() for v in array.reshape(-1)]
    lengths = np.array([len(value) for value in values], np.int64)
    return pb.Tensor(dtype="bytes", shape=array.shape, content=lengths.tobytes() + b"".join(values), name=name)


def _strings_from_message(message: pb.Tensor) -> Array:
    count = math.prod(message.shape)
    if len(message.content) < 8 * count:
        raise WireError(f"Tensor {message.name!r} of {count} strings ends inside its table of lengths.")
    lengths = np.frombuffer(message.content[: 8 * count], np.int64)
    ends = 8 * count + np.cumsum(lengths)
    if count and (lengths.min() < 0 or ends[-1] != len(message.content)):
        raise WireError(f"Tensor {message.name!r} of {count} strings has wrong lengths.")
    values = [message.content[end - size : end] for end, size in zip(ends, lengths, strict=True)]
    array = np.empty(count, object)
    array[:] = values
    return array.reshape(tuple(message.shape))
