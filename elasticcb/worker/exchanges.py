"""A worker's pushes and lookups: one after another, or beside the computation of the next batches.

With `max_staleness` 0 each call waits for the servers' answer. Otherwise one thread speaks to the servers, in the order
of the calls, while the next batches are computed; the rows of embedding tables that these need are asked for ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from elasticcb.clients.ps import PSClient, PushResult
from elasticcb.sharding.push import Gradients
from elasticcb.worker.task_input import Batch


class Exchanges:
    """What a worker says to the servers while it trains.

    Args:
        ps: the servers.
        max_staleness: batches that are computed before the first of their pushes must be answered.
        pull_with_rows: fetch newer weights with rows that did not come along with a push.
    """

    def __init__(self, ps: PSClient, max_staleness: int, pull_with_rows: bool) -> None:
        self._ps = ps
        self._max_staleness = max_staleness
        self._pull_with_rows = pull_with_rows
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exchange") if max_staleness else None
        # By the id of a batch to come: it, and the answer to what was asked for it.
        self._rows: dict[int, tuple[Batch, Future[PushResult | dict[int, Any]]]] = {}

    @property
    def batches_ahead(self) -> int:
        """Batches to come whose rows are worth asking for."""
        return 1 + self._max_staleness

    def rows_of(self, batch: Batch) -> dict[int, Any]:
        """The rows of embedding tables that a training batch needs."""
        _, answer = self._rows.pop(id(batch), (None, None))
        found = {} if answer is None else answer.result()
        if isinstance(found, PushResult):
            found = found.rows  # none with a push that was refused
        return found or self._run(self._lookup, batch).result()

    def push(
        self, push: Gradients, learning_rate: float | None, pull: bool, coming: Sequence[Batch]
    ) -> Future[PushResult]:
        """Hands gradients over; `PSClient.push` says more.

        Args:
            coming: the next batches; the rows that they need are fetched, too.
        """
        wanted = [batch for batch in coming if batch.ids and id(batch) not in self._rows]
        first = wanted[0] if wanted else None
        answer = self._run(self._ps.push, push, learning_rate, pull, None if first is None else first.ids)
        if first is not None:
            self._rows[id(first)] = first, answer
        if self._pool is not None:
            for batch in wanted[1:]:
                self._rows[id(batch)] = batch, self._run(self._lookup, batch)
        return answer

    def forget_rows(self) -> None:
        """What was asked for ahead is of no use: weights have been pulled since, or other batches come."""
        self._rows.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _lookup(self, batch: Batch) -> dict[int, Any]:
        return self._ps.lookup(batch.ids, create=True, pull=self._pull_with_rows) if batch.ids else {}

    def _run(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pool is not None:
            return self._pool.submit(function, *args)
        done: Future[Any] = Future()
        done.set_result(function(*args))  # an error is the caller's
        return done
