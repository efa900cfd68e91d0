"""Changes messages at random: bytes, lengths, values of a header, arrays and their names."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from elasticcb.rpc.tensors import Frame, decode_frame, dtype_of, encode_frame

# UNKNOWN and INTERNAL stand for an exception that nobody thought of.
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**62, 2**40)
_TEXTS = ("", "float32", "bfloat16", "int64", "object", "weights/float32", "rows/5/ids", "lookup/99", "\0", "ä" * 50)


def changed_frame(frame: Frame[Any], header_type: Callable[[], Any], generator: random.Random) -> bytes:
    """The bytes of a frame in which something is not as it was."""
    whole = encode_frame(frame)
    kind = generator.randrange(5)
    if kind == 0:
        return changed_bytes(whole, generator)
    if kind == 1:
        return whole[: generator.randrange(len(whole))] + generator.randbytes(generator.choice((0, 0, 9)))
    frame = decode_frame(whole, header_type)
    tensors = {name: array.copy() for name, array in frame.tensors.items()}
    if kind == 2 or not tensors:
        return _with_another_header(frame, generator)
    name = generator.choice(sorted(tensors))
    if kind == 3:
        tensors[name] = _other_array(tensors[name], generator)
    else:
        array = tensors.pop(name)
        tensors[generator.choice((name + "x", *_TEXTS))] = array
    return encode_frame(Frame(frame.header, tensors))


def changed_bytes(whole: bytes, generator: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(generator.choice((1, 1, 3, 20))):
        data[generator.randrange(len(data))] = generator.randrange(256)
    return bytes(data)


def _other_array(array: np.ndarray, generator: random.Random) -> np.ndarray:
    kind = generator.randrange(5)
    flat = array.reshape(-1)
    if kind == 0 and flat.size:
        wrong = generator.choice((np.nan, np.inf, 1e38) if array.dtype.kind == "f" else (-1, 0))
        flat[generator.randrange(flat.size)] = np.array(wrong).astype(array.dtype)  # -1 of unsigned: the largest
        return array
    if kind == 1:
        return array.astype(dtype_of(generator.choice(("int8", "float64", "bfloat16", "bool", "complex64"))))
    if kind == 2:
        return flat[: generator.randrange(flat.size + 1)]
    if kind == 3:
        return np.concatenate([flat, flat])
    return array.reshape(*array.shape, 1)


def _with_another_header(frame: Frame[Any], generator: random.Random) -> bytes:
    """One value anywhere in the header is another one; the arrays stay as they are."""
    whole = encode_frame(frame)
    end = 8 + int.from_bytes(whole[4:8], "little")
    header = type(frame.header).FromString(whole[8:end])
    change_one_value(header, generator)
    encoded = header.SerializeToString()
    return whole[:4] + len(encoded).to_bytes(4, "little") + encoded + whole[end:]


def change_one_value(message: Any, generator: random.Random) -> None:
    """Gives a value anywhere in a protobuf message, or in the messages in it, another value of its type."""
    if not message.DESCRIPTOR.fields:
        return
    field = generator.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.is_repeated:
        if not len(value) or (field.message_type and field.message_type.GetOptions().map_entry):
            return
        place = generator.randrange(len(value))
        if generator.random() < 0.2:
            del value[place]
        elif field.message_type:
            change_one_value(value[place], generator)
        else:
            value[place] = _other_value(field, value[place], generator)
    elif field.message_type:
        change_one_value(value, generator)
    else:
        setattr(message, field.name, _other_value(field, value, generator))


def _other_value(field: Any, value: Any, generator: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        # A folder to write to, or to read from, is no matter of this test.
        return value if "director" in field.name or field.name == "checkpoint" else generator.choice(_TEXTS)
    if isinstance(value, bytes):
        return generator.randbytes(5)
    if isinstance(value, float):
        return generator.choice((float("nan"), float("inf"), -1.0, 0.0, 1e300))
    number = generator.choice(_NUMBERS)
    return number % 2**31 if field.type in (field.TYPE_INT32, field.TYPE_ENUM) else number
