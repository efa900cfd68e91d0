"""Runs requests to a served model: those that wait at the same time run as one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.errors import ElasticCBError
from elasticcb.process.devices import usable_cores
from elasticcb.rpc.tensors import Array
from elasticcb.serving.served_model import Predicted, ServedModel

# Batches that run at the same time. TensorFlow computes each with all cores, and fewer batches are larger.
_RUNNERS = 1 if usable_cores() < 4 else 2


class TooManyRequestsError(ElasticCBError):
    """As many requests as allowed wait already."""


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
        most_waiting: more requests than these are refused.
        most_examples: of a batch; a larger request is a batch by itself.
        note: called with the number of requests in each batch, in other threads.
    """

    def __init__(self, model: ServedModel, most_waiting: int, most_examples: int, note: Callable[[int], None]) -> None:
        self._model, self._most_waiting, self._most_examples, self._note = model, most_waiting, most_examples, note
        self._waiting: deque[_Waiting] = deque()
        self._running = 0
        self._threads = ThreadPoolExecutor(_RUNNERS, "predict")
        self._loop = asyncio.get_running_loop()

    async def predict(self, features: Mapping[str, Array], signature: str) -> Predicted:
        """Like `ServedModel.predict`. Raises `TooManyRequestsError` in addition."""
        if len(self._waiting) >= self._most_waiting:
            raise TooManyRequestsError(f"{self._most_waiting} requests wait already. Try again later.")
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
        kind, room = batch[0].kind, self._most_examples - batch[0].examples
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
        self._note(len(batch))
        answers: Sequence[Predicted | Exception] | None = self._together(batch) if len(batch) > 1 else None
        answers = answers or [self._by_itself(each) for each in batch]
        self._loop.call_soon_threadsafe(self._finish, batch, answers)

    def _together(self, batch: Sequence[_Waiting]) -> list[Predicted] | None:
        """None: they must run one by one, because of what one of them contains, or because of the model."""
        joined = {name: np.concatenate([each.features[name] for each in batch]) for name in batch[0].features}
        try:
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
