"""Buffers of PyTorch modules that Keras layers hold, such as the moving statistics of `BatchNorm1d`. Keras does not
count them among a model's variables."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np


class Buffer:
    """A buffer, with what is used of variables."""

    def __init__(self, path: str, tensor: Any) -> None:
        self.path, self.tensor = path, tensor

    def numpy(self) -> np.ndarray:
        return np.array(self.tensor.detach().cpu().numpy())

    def assign(self, value: Any) -> None:
        self.tensor.data.copy_(self.tensor.new_tensor(np.asarray(value)))


def buffers_of(layers: Iterable[Any]) -> list[Buffer]:
    """The buffers in some layers; of other backends than PyTorch, none."""
    named = [pair for layer in layers if hasattr(layer, "named_buffers") for pair in layer.named_buffers()]
    return [Buffer(name, tensor) for name, tensor in {id(pair[1]): pair for pair in named}.values()]


def make_buffer(path: str, dtype: str, value: np.ndarray) -> Buffer:
    torch = importlib.import_module("torch")  # only if the model uses it
    return Buffer(path, torch.tensor(value, dtype=getattr(torch, dtype)))


def tensor_of(buffer: Buffer) -> Any:
    return buffer.tensor
