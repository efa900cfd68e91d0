"""The precision in which a worker's arrays are transferred, in both directions (`--wire_dtype`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.settings import WireDtype
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.wire_codec import narrowed, widened


class Rounding:
    """The precision of one client's requests, pushes and answers.

    Args:
        wire_dtype: of gradients, movements, and embedding rows for training.
        weights: whether pulled weights use it too.
    """

    def __init__(self, wire_dtype: WireDtype = WireDtype.SAME, weights: bool = False) -> None:
        self._wire_dtype = wire_dtype
        self._weights_dtype = wire_dtype if weights else WireDtype.SAME

    def ask(self, request: pb.ExchangeRequest) -> None:
        """Requests the precision of the answer. Rows that are not for training are not rounded."""
        request.rows_dtype = (self._wire_dtype if request.create_rows else WireDtype.SAME).value
        request.weights_dtype = self._weights_dtype.value

    def ask_for_exact(self, request: pb.ExchangeRequest) -> None:
        """Requests unrounded weights, including those that the client has rounded."""
        if self._weights_dtype is not WireDtype.SAME:
            request.known_version, request.weights_dtype = -1, WireDtype.SAME.value

    def sent(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays of a push, as transferred."""
        return narrowed(arrays, self._wire_dtype)

    def received(self, arrays: Mapping[str, Array], specs: Sequence[VariableSpec]) -> Mapping[str, Array]:
        """The arrays as the receiver decodes them."""
        return arrays if self._wire_dtype is WireDtype.SAME else widened(arrays, specs)

    def answers(self, frames: Sequence[Frame[Any]], specs: Sequence[VariableSpec]) -> list[Frame[Any]]:
        """Decodes the servers' answers."""
        if self._wire_dtype is WireDtype.SAME:
            return list(frames)
        return [Frame(frame.header, self.received(frame.tensors, specs)) for frame in frames]
