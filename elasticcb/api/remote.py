"""References to objects on workers: values that functions return, per-worker datasets and their iterators.

Each is pickled as a reference, which is resolved where a function runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from elasticcb.errors import UsageError
from elasticcb.serialization import carry
from elasticcb.serialization.object_paths import references
from elasticcb.worker.functions import dataset_here, iterator_here, value_here


class RemoteValue:
    """The future result of a scheduled function. It can be an argument of another function."""

    def __init__(self, job: Any, number: int, name: str) -> None:
        self._job = job
        self.owner = job.owner
        self.number = number
        self.name = name
        self.data: bytes | None = None  # pickled
        self.error: Exception | None = None
        self._there = threading.Event()

    def settle(self, data: bytes | None = None, error: Exception | None = None) -> None:
        self.data, self.error = data, error
        self._there.set()

    def done(self) -> bool:
        """Whether the function has returned, failed or was cancelled."""
        return self._there.is_set()

    def fetch(self) -> Any:
        """Waits for the function and returns its result, with tensors as NumPy arrays.

        Raises:
            FunctionError: the function raised an error, which is the cause, or was cancelled.
            JobFailedError: the cluster could not run the function.
        """
        self._there.wait()
        if self.error is not None:
            self._job.has_told(self.error)
            raise self.error
        assert self.data is not None
        return carry.loads(self.data, references(self._job.model))

    def __reduce__(self) -> Any:
        _sent_to(self.owner, "A value").append(self)
        return value_here, (self.number,)

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "done" if self.error is None else "failed"
        return f"<RemoteValue of {self.name}(): {state}>"


class PerWorkerDataset:
    """A dataset that each worker creates for itself; `iter` returns a reference to its iterators."""

    def __init__(self, owner: Any, number: int) -> None:
        self._owner = owner
        self._number = number

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._owner, self._owner.next_number(), self._number)

    def __reduce__(self) -> Any:
        _sent_to(self._owner, "A dataset")
        return dataset_here, (self._number,)


class PerWorkerIterator:
    """A reference to one iterator on each worker. Pass it to functions, which call `next` on it."""

    def __init__(self, owner: Any, number: int, dataset: int) -> None:
        self._owner = owner
        self._numbers = (number, dataset)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise UsageError(
            "The records of a per-worker dataset are on the workers. Pass the iterator to a function and call `next` "
            "there: cluster.schedule(step, iterator)."
        )

    def __reduce__(self) -> Any:
        _sent_to(self._owner, "An iterator")
        return iterator_here, self._numbers


_sending = threading.local()  # during pickling: its `owner`, and the `values` found


def _sent_to(owner: Any, what: str) -> list[RemoteValue]:
    to = getattr(_sending, "owner", None)
    if to is not owner:
        where = "was pickled outside of schedule" if to is None else "was passed to a function of another Cluster"
        raise UsageError(f"{what} of a Cluster {where}. Pass it only to functions that the same Cluster schedules.")
    values: list[RemoteValue] = _sending.values
    return values


@contextlib.contextmanager
def sending_to(owner: Any) -> Iterator[list[RemoteValue]]:
    """Context in which the arguments of a function are pickled; yields the values found in them."""
    _sending.owner, _sending.values = owner, []
    try:
        yield _sending.values
    finally:
        _sending.owner = None
