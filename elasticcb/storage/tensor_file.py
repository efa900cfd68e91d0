"""Writes safetensors files in pieces; the library itself writes only tensors that are completely in memory."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elasticcb.rpc.tensors import Array

_SIZE = struct.Struct("<Q")  # of the header
_ALIGNMENT = 8
_KINDS = {"f": "F", "i": "I", "u": "U", "c": "C"}


class Outline(NamedTuple):
    """The description of a tensor, without its values."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A file that is being written; a context manager. All methods may raise `OSError`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._begins: dict[str, int] = {}  # byte in the file
        self._outlines: Mapping[str, Outline] = {}

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def begin(self, tensors: Mapping[str, Outline], metadata: Mapping[str, str]) -> None:
        """Writes the header. All of its tensors must follow."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        position = 0
        # The largest elements first, so that each tensor is aligned to its element size.
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            outline, self._begins[name] = tensors[name], position
            position += outline.bytes
            offsets = [self._begins[name], position]
            header[name] = {"dtype": _name_of(outline.dtype), "shape": list(outline.shape), "data_offsets": offsets}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % _ALIGNMENT)
        start = _SIZE.size + len(encoded)
        self._begins = {name: start + begin for name, begin in self._begins.items()}
        self._outlines = tensors
        self._file.write(_SIZE.pack(len(encoded)) + encoded)

    def put(self, name: str, first: int, array: Array) -> None:
        """Writes `array`, the part of the tensor from index `first` of its first axis on."""
        outline = self._outlines[name]
        row_bytes = math.prod(outline.shape[1:]) * outline.dtype.itemsize
        self._file.seek(self._begins[name] + first * row_bytes)
        if array.size:
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _name_of(dtype: np.dtype[Any]) -> str:
    if dtype.name in ("bool", "bfloat16"):
        return {"bool": "BOOL", "bfloat16": "BF16"}[dtype.name]
    return f"{_KINDS[dtype.kind]}{8 * dtype.itemsize}"
