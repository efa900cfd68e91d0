"""Answers requests to a served model, of any protocol."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticcb.errors import CheckpointError, UsageError, describe
from elasticcb.serving.batches import Batcher, TooManyRequestsError
from elasticcb.serving.served_model import Predicted, ServedModel
from elasticcb.serving.serving_metrics import ServingMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeOptions:
    """How a model is served.

    Attributes:
        name: of the model in addresses.
        port, grpc_port: 0: any free one; grpc_port None: no gRPC.
        token: that requests must carry; "": none.
        tls_ca: clients must present a certificate of this CA; "": they need none.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8501
    grpc_port: int | None = None
    token: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    max_waiting: int = 1000
    max_batch: int = 1024
    max_body: int = 64 << 20

    def check_token(self, authorization: str) -> None:
        """Raises `UnauthorizedError`."""
        scheme, _, given = authorization.partition(" ")
        if self.token and not (scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), self.token.encode())):
            raise UnauthorizedError("The token is missing or wrong. Send the header `Authorization: Bearer TOKEN`.")


class UnauthorizedError(UsageError):
    """A request does not have the token."""


class UnknownModelError(UsageError):
    """A request is for another model or version than the served one."""


class TooLargeError(UsageError):
    """The body of a request is too large."""


# What a request can fail of: status of HTTP, and of gRPC.
STATUSES: Mapping[type[Exception], tuple[int, str]] = {
    UnauthorizedError: (401, "UNAUTHENTICATED"),
    UnknownModelError: (404, "NOT_FOUND"),
    TooLargeError: (413, "RESOURCE_EXHAUSTED"),
    TooManyRequestsError: (429, "RESOURCE_EXHAUSTED"),
    UsageError: (400, "INVALID_ARGUMENT"),
    CheckpointError: (503, "UNAVAILABLE"),
    Exception: (500, "INTERNAL"),
}


def status_of(error: Exception) -> tuple[int, str, str]:
    """The status of HTTP and of gRPC for an error, and its text."""
    http, grpc = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    if http == 500:
        logger.error("A request failed: %s", describe(error), exc_info=error)
        return http, grpc, "The model failed; the server's log has the error."
    return http, grpc, str(error)


class ModelService:
    """Answers requests, of any protocol; belongs to one event loop."""

    def __init__(self, model: ServedModel, options: ServeOptions) -> None:
        self.model, self.options, self.metrics = model, options, ServingMetrics(model)
        self._batcher = Batcher(model, options.max_waiting, options.max_batch, self.metrics.batches.observe)

    def check_target(self, name: str, version: int | None) -> None:
        """Raises `UnknownModelError` if that is not what is served."""
        if name != self.options.name:
            raise UnknownModelError(f"There is no model {name!r} here. Expected {self.options.name!r}.")
        if version is not None and version != self.model.version:
            raise UnknownModelError(f"Version {version} is not served now. The served version is {self.model.version}.")

    async def predict(self, features: Mapping[str, Any], signature: str, version: int | None) -> Predicted:
        """Raises the errors in `STATUSES`."""
        answer = await self._batcher.predict(features, signature)
        if version not in (None, answer.version):  # it has been replaced meanwhile
            self.check_target(self.options.name, version)
        return answer

    def note(self, protocol: str, status: str, began: float) -> None:
        self.metrics.requests.labels(protocol, status).inc()
        self.metrics.seconds.observe(time.perf_counter() - began)

    def close(self) -> None:
        self._batcher.close()
