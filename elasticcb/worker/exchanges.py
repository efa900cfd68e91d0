"""A worker's pushes and lookups: synchronous, or overlapped with the computation of the next batches.

With `max_staleness` 0 each call waits for the servers' answer. Otherwise one thread makes the calls in order while the
next batches are computed, and prefetches the embedding rows that these need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from elasticcb.clients.ps import PSClient, PushResult
from elasticcb.sharding.push import Movement
from elasticcb.worker.task_input import Batch


class Exchanges:
    """A worker's calls to the servers during training.

    Args:
        max_staleness: batches that may be computed before the first of their pushes is answered.
    """

    def __init__(self, ps: PSClient, max_staleness: int) -> None:
        self._ps = ps
        self._max_staleness = max_staleness
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exchange") if max_staleness else None
        # By id of an upcoming batch: the batch, and the answer to its prefetch.
        self._rows: dict[int, tuple[Batch, Future[PushResult | dict[int, Any]]]] = {}

    @property
    def batches_ahead(self) -> int:
        """Number of upcoming batches whose rows should be prefetched."""
        return 1 + self._max_staleness

    def rows_of(self, batch: Batch) -> dict[int, Any]:
        """The rows of embedding tables that a training batch needs."""
        _, answer = self._rows.pop(id(batch), (None, None))
        if answer is None:
            answer = self._run(self._lookup, batch)
        found = answer.result()
        return found.rows if isinstance(found, PushResult) else found

    def push(self, rows: Movement, coming: Sequence[Batch]) -> Future[PushResult]:
        """Sends gradients of rows, and prefetches those of the coming batches."""
        wanted = [batch for batch in coming if batch.ids and id(batch) not in self._rows]
        first = wanted[0] if wanted else None
        answer = self._run(self._ps.push, rows, (), None if first is None else first.ids)
        if first is not None:
            self._rows[id(first)] = first, answer
        if self._pool is not None:
            for batch in wanted[1:]:
                self._rows[id(batch)] = batch, self._run(self._lookup, batch)
        return answer

    def forget_rows(self) -> None:
        """Discards prefetched rows: weights have been pulled since, or other batches come next."""
        self._rows.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _lookup(self, batch: Batch) -> dict[int, Any]:
        return self._ps.lookup(batch.ids, create=True) if batch.ids else {}

    def _run(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pool is not None:
            return self._pool.submit(function, *args)
        done: Future[Any] = Future()
        done.set_result(function(*args))  # the caller gets the error
        return done
