"""Answers requests to a served model, of any protocol: those that wait at the same time run as one batch. Its metrics,
for Prometheus; docs/serving.md lists them."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elasticcb.errors import CheckpointError, ElasticCBError, UsageError, describe
from elasticcb.process.devices import usable_cores
from elasticcb.process.stats import resident_bytes
from elasticcb.rpc.tensors import Array
from elasticcb.serving.served_model import Predicted, ServedModel

logger = logging.getLogger(__name__)

# Batches that run at the same time. TensorFlow computes each with all cores, and fewer batches are larger.
_RUNNERS = 1 if usable_cores() < 4 else 2

_PREFIX = "elasticcb_serving_"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class ServeOptions:
    """How a model is served.

    Attributes:
        name: of the model in addresses.
        port, grpc_port: 0: any free one; grpc_port None: no gRPC.
        token: that requests must carry; "": none.
        max_waiting: more requests than these are refused.
        max_batch: examples of a batch; a larger request is a batch by itself.
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
    max_body: int = 16 << 20

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


class TooManyRequestsError(ElasticCBError):
    """As many requests as allowed wait already."""


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
        self._batcher = Batcher(model, options, self.metrics.batches)

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


@dataclass(eq=False)
class _Waiting:
    signature: str
    features: Mapping[str, Array]
    examples: int
    kind: Any  # requests of equal kinds can run as one; None: each by itself
    answered: asyncio.Future[Predicted]


class Batcher:
    """Belongs to one event loop.

    Args:
        sizes: of the numbers of requests in batches.
    """

    def __init__(self, model: ServedModel, options: ServeOptions, sizes: Histogram) -> None:
        self._model, self._options, self._sizes = model, options, sizes
        self._waiting: deque[_Waiting] = deque()
        self._running = 0
        self._threads = ThreadPoolExecutor(_RUNNERS, "predict")
        self._loop = asyncio.get_running_loop()

    async def predict(self, features: Mapping[str, Array], signature: str) -> Predicted:
        """Like `ServedModel.predict`. Raises `TooManyRequestsError` in addition."""
        if len(self._waiting) >= self._options.max_waiting:
            raise TooManyRequestsError(f"{self._options.max_waiting} requests wait already. Try again later.")
        kind, examples = self._kind_of(features, signature)
        waiting = _Waiting(signature, features, examples, kind, self._loop.create_future())
        self._waiting.append(waiting)
        if self._running < _RUNNERS:
            self._start()
        return await waiting.answered

    def _kind_of(self, features: Mapping[str, Array], signature: str) -> tuple[Any, int]:
        sizes = {array.shape[:1] for array in features.values()}
        if len(sizes) != 1 or not self._model.signature(signature).is_of_batches:
            return None, 1
        ((examples,),) = sizes
        return (signature, *((name, array.dtype, array.shape[1:]) for name, array in features.items())), examples

    def _start(self) -> None:
        self._running += 1
        self._threads.submit(self._run, self._take())

    def _take(self) -> list[_Waiting]:
        """The oldest request, and those that can run with it."""
        batch = [self._waiting.popleft()]
        kind, room = batch[0].kind, self._options.max_batch - batch[0].examples
        left: deque[_Waiting] = deque()
        while kind is not None and self._waiting:
            following = self._waiting.popleft()
            if following.kind == kind and following.examples <= room:
                batch.append(following)
                room -= following.examples
            else:
                left.append(following)
        self._waiting = left or self._waiting
        return batch

    def _run(self, batch: Sequence[_Waiting]) -> None:
        self._sizes.observe(len(batch))
        answers: Sequence[Predicted | Exception] | None = self._together(batch) if len(batch) > 1 else None
        answers = answers or [self._by_itself(each) for each in batch]
        self._loop.call_soon_threadsafe(self._finish, batch, answers)

    def _together(self, batch: Sequence[_Waiting]) -> list[Predicted] | None:
        """None: they must run one by one, because of what one of them contains, or because of the model."""
        try:
            joined = {name: np.concatenate([each.features[name] for each in batch]) for name in batch[0].features}
            answer = self._model.predict(joined, batch[0].signature)
        except Exception:
            return None
        ends = np.cumsum([each.examples for each in batch])
        if any(output.shape[:1] != (ends[-1],) for output in answer.values()):
            return None
        parts = {name: np.split(output, ends[:-1]) for name, output in answer.items()}
        own = ({name: part[place] for name, part in parts.items()} for place in range(len(batch)))
        return [Predicted(outputs, answer.version) for outputs in own]

    def _by_itself(self, waiting: _Waiting) -> Predicted | Exception:
        try:
            return self._model.predict(waiting.features, waiting.signature)
        except Exception as error:
            return error

    def _finish(self, batch: Sequence[_Waiting], answers: Sequence[Predicted | Exception]) -> None:
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.answered.done():  # cancelled
                continue
            if isinstance(answer, Exception):
                waiting.answered.set_exception(answer)
            else:
                waiting.answered.set_result(answer)
        self._running -= 1
        if self._waiting:
            self._start()

    def close(self) -> None:
        self._threads.shutdown()


class ServingMetrics:
    """Attributes:
    registry: everything below, and the state of the model.
    """

    def __init__(self, model: ServedModel) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_ModelCollector(model))
        self.requests = Counter(
            f"{_PREFIX}requests",
            "Requests to predict, by protocol and status (499 and CANCELLED: the client did not wait for the answer).",
            ["protocol", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            f"{_PREFIX}request_duration_seconds", "Time from the whole request to its answer.", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.batches = Histogram(
            f"{_PREFIX}batch_requests", "Requests that ran as one batch.", buckets=_REQUESTS, registry=self.registry
        )


class _ModelCollector(Collector):
    """What is served, at each scrape."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        text = "1: the wanted version can't be served, the log has the reason; 0: it is served."
        yield _gauge("problem", text, bool(self._model.problem))
        yield _gauge("resident_memory_bytes", "Resident memory of the process (Linux).", resident_bytes())
        export, age = self._model.export, self._model.age
        if export is None or age is None:
            return
        yield _gauge("version", "The served version.", export.version)
        yield _gauge("version_age_seconds", "Time since the served version was written.", age)
        rows = GaugeMetricFamily(f"{_PREFIX}table_rows", "Rows of an embedding table.", labels=["table"])
        for path, count in self._model.rows.items():
            rows.add_metric([path], count)
        yield rows


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}{name}", text, value=value)
