"""Arrays on the wire.

`to_message` and `from_message` store small arrays inside protobuf messages. Frames carry large ones: a protobuf header
whose `tensors` field describes arrays, followed by their raw bytes, so that nothing is encoded and a received array is
a view of the received message (docs/wire_protocol.md).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb

Array = npt.NDArray[Any]
Header = TypeVar("Header")

_PREFIX = struct.Struct("<4sI")  # magic number, bytes of the header
_MAGIC = b"ECB1"
ALIGNMENT = 64  # of each array: TensorFlow needs no copy if their memory begins at a multiple of it
_CHUNK_BYTES = 32 << 20  # of a frame in one message of gRPC, which holds less than 4 GiB

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
    return _view(memoryview(message.content), *_outline_of(message), message.name)


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike, zeros: bool = False) -> Array:
    """An array whose memory TensorFlow can use without a copy.

    Args:
        zeros: its elements are 0; the memory is not touched.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = (np.zeros if zeros else np.empty)(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
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


@dataclass(frozen=True)
class Frame(Generic[Header]):
    """A header and its arrays, by name."""

    header: Header
    tensors: Mapping[str, Array]


def encode_frame(frame: Frame[Any]) -> bytes:
    """The bytes of `frame` with its arrays."""
    encoded, arrays = encode_header(frame)
    parts: list[Any] = [encoded]
    size = len(encoded)
    for array in arrays:
        padding = -size % ALIGNMENT
        parts += [bytes(padding), array.reshape(-1).view(np.uint8).data]
        size += padding + array.nbytes
    return b"".join(parts)


def in_chunks(data: bytes) -> Iterator[bytes]:
    """The messages in which the bytes of a frame are sent over gRPC."""
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def encode_header(frame: Frame[Any]) -> tuple[bytes, list[Array]]:
    """The bytes of `frame` without its arrays, and these arrays. Sets the `tensors` field of its header."""
    header = frame.header
    del header.tensors[:]
    arrays = []
    for name, array in frame.tensors.items():
        array = np.asarray(array, order="C")
        header.tensors.add(dtype=_name_of(array.dtype), shape=array.shape, name=name)
        arrays.append(array)
    encoded = header.SerializeToString()
    return _PREFIX.pack(_MAGIC, len(encoded)) + encoded, arrays


def decode_header(data: bytes, header_type: type[Header], read: Callable[[int, int], Any]) -> Frame[Header]:
    """The frame whose `encode_header` is `data`; `read(offset, size)` returns the bytes of its arrays, which are stored
    consecutively at multiples of `ALIGNMENT`. Raises `WireError` like `decode_frame`."""
    header, _ = _header_of(data, header_type)
    return Frame(header, _tensors_of(header, read))


def _header_of(data: bytes, header_type: type[Any]) -> tuple[Any, int]:
    """A frame's header, and where it ends."""
    header = header_type()
    try:
        magic, header_size = _PREFIX.unpack_from(data)
        position = _PREFIX.size + header_size
        if magic != _MAGIC or position > len(data):
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
    header, end = _header_of(data, header_type)
    body = memoryview(data)[end + -end % ALIGNMENT :]
    return Frame(header, _tensors_of(header, lambda offset, size: body[offset : offset + size]))


def _tensors_of(header: Any, read: Callable[[int, int], Any]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    position = 0
    for description in header.tensors:
        dtype, shape = _outline_of(description)
        size = math.prod(shape) * dtype.itemsize
        position += -position % ALIGNMENT
        tensors[description.name] = _view(read(position, size), dtype, shape, description.name)
        position += size
    return tensors


def _outline_of(message: pb.Tensor) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The declared dtype and shape of an array."""
    shape = tuple(message.shape)
    if shape and min(shape) < 0:
        raise WireError(f"Tensor {message.name!r} has the shape {list(shape)}, with a negative size.")
    return dtype_of(message.dtype), shape


def _view(content: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> Array:
    size = math.prod(shape) * dtype.itemsize
    if len(content) != size:
        raise WireError(
            f"Tensor {name!r} is declared as {_name_of(dtype)}{list(shape)}, which takes {size} bytes, but "
            f"{len(content)} were received."
        )
    array: Array = np.frombuffer(content, dtype).reshape(shape)
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
