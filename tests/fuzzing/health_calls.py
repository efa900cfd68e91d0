"""Broken calls to the health service, which anybody may make who reaches its port."""

from __future__ import annotations

import random
from collections import Counter

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from mutations import ALLOWED, change_one_value, changed_bytes

_SERVICES = ("", "elasticcb.Master", "elasticcb.ParameterServer")
_METHODS = ("Check", "Check", "Check", "Check", "Watch", "List", "")  # those that it answers, and others


class HealthFuzzer:
    """Sends broken calls to the health service at an address.

    Attributes:
        codes: how often each status was the answer.
        surprises: calls that were answered by a status that nobody thought of: (method, status, words).
    """

    def __init__(self, seed: int, address: str) -> None:
        self._random = random.Random(seed)
        self._channel = grpc.insecure_channel(address)
        self.codes: Counter[str] = Counter()
        self.surprises: set[tuple[str, str, str]] = set()

    def run(self, messages: int) -> None:
        for _ in range(messages):
            self._send(self._random.choice(_METHODS), self._message())

    def _message(self) -> bytes:
        if self._random.random() < 0.1:
            return self._random.randbytes(self._random.choice((1, 50, 4_000, 50_000)))
        request = health_pb2.HealthCheckRequest(service=self._random.choice(_SERVICES))
        if self._random.random() < 0.3:
            change_one_value(request, self._random)
        data = request.SerializeToString()
        return changed_bytes(data, self._random) if data and self._random.random() < 0.5 else data

    def _send(self, method: str, data: bytes) -> None:
        try:
            self._channel.unary_unary(f"/grpc.health.v1.Health/{method}")(data, timeout=30.0)
            code, words = grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            code, words = error.code(), error.details()
        self.codes[code.name] += 1
        other = {grpc.StatusCode.UNIMPLEMENTED} if method != "Check" else set()
        if "max_age" in words:  # so long a connection may last
            other.add(grpc.StatusCode.UNAVAILABLE)
        if code not in ALLOWED | other:
            self.surprises.add((method, code.name, words.split("\n")[0][:200]))

    def still_serves(self) -> bool:
        """Whether it answers a call as it should be."""
        answer = HealthStub(self._channel).Check(health_pb2.HealthCheckRequest(), timeout=30.0)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        self._channel.close()
