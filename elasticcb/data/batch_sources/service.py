"""Serves batches of data without an index from the process that calls `fit`: each goes to the worker that asks next.

They are sent by a service at the master's port; its calls carry the job's token.
"""

from __future__ import annotations

import pickle
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from elasticcb.errors import DataError, describe, user_traceback
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.services import NEXT_BATCH
from elasticcb.rpc.shared_frames import aligned_copy
from elasticcb.rpc.tensors import Frame

_OVER = "There are no more batches: the call that they belong to has ended."

Arrays = list[Any]  # arrays of a batch: numbers, or bytes objects


class DataService:
    """The data of all calls under way."""

    def __init__(self) -> None:
        self._registered: dict[int, _SharedBatches] = {}

    def frames(self) -> FrameService:
        """The RPC service from which workers request batches."""
        return FrameService({NEXT_BATCH: self._next})

    def register(
        self, passes: Iterator[Iterator[Any]], arrays_of: Callable[[Any], Arrays], size: int | None, *, by_epoch: bool
    ) -> int:
        """Starts serving batches, each to one process; returns the number of the stream.

        Args:
          passes: iterator of iterators over batches, one per pass.
          arrays_of: function that splits a batch into arrays.
          size: number of batches in a pass, if known.
          by_epoch: an epoch is a pass; otherwise an epoch continues where the previous one ended, up to the pass's end.
        """
        number = secrets.randbits(62)
        self._registered[number] = _SharedBatches(passes, arrays_of, None if by_epoch else size, by_epoch)
        return number

    def release(self, number: int) -> None:
        """Stops serving these batches, and frees them."""
        shared = self._registered.pop(number, None)
        if shared is not None:
            shared.close()

    def _next(self, frame: Frame[pb.NextBatchRequest]) -> Frame[pb.NextBatchResponse]:
        asked = frame.header
        shared = self._registered.get(asked.source)
        if shared is None:
            raise DataError(_OVER)
        arrays = shared.next(asked.epoch, asked.reader, asked.number)
        return Frame(pb.NextBatchResponse(), {}) if arrays is None else _packed(arrays)


class _SharedBatches:
    """The iterator of each epoch, which all processes share."""

    def __init__(
        self, passes: Iterator[Iterator[Any]], arrays_of: Callable[[Any], Arrays], size: int | None, by_epoch: bool
    ) -> None:
        self._passes = passes
        self._size, self._read = size, 0  # of the present pass, unless each epoch is one
        self._ended: set[int] = set()  # epochs in which a pass has ended
        self._arrays_of = arrays_of
        self._by_epoch = by_epoch
        self._iterators: dict[int, Iterator[Any]] = {}
        # for each reader, the number of its last batch, and the batch
        self._given: dict[int, tuple[int, Arrays | None]] = {}
        self._error = ""  # for all later requests, because a generator that raised has ended
        self._lock = threading.Lock()

    def next(self, epoch: int, reader: int, number: int) -> Arrays | None:
        """The arrays of the next batch; None at the end of the epoch.

        Raises `DataError` if the user's code raises.
        """
        with self._lock:
            last, arrays = self._given.get(reader, (-1, None))
            if number <= last:  # a repeated request, or a late first attempt whose answer nobody waits for
                return arrays
            if not self._error:
                try:
                    batch = self._of_epoch(epoch) if self._by_epoch else self._of_steps(epoch)
                    arrays = None if batch is None else self._arrays_of(batch)
                    self._given[reader] = number, arrays
                    return arrays
                except Exception as error:  # any error of the user's code
                    self._error = f"The data that `fit` was given raised {describe(error)}\n\n{user_traceback(error)}"
            raise DataError(self._error)

    def close(self) -> None:
        # Without the lock, because the user's code may take long.
        self._error = _OVER
        self._passes, self._iterators, self._given = iter(()), {}, {}

    def _of_epoch(self, epoch: int) -> Any:
        if epoch not in self._iterators:
            self._iterators[epoch] = next(self._passes)
            for old in self._iterators:
                if old < epoch - 1:
                    self._iterators[old] = iter(())  # frees unrequested batches
        return next(self._iterators[epoch], None)

    def _of_steps(self, epoch: int) -> Any:
        if epoch in self._ended:
            return None
        if 0 not in self._iterators:
            self._iterators[0], self._read = next(self._passes), 0
        batch = next(self._iterators[0], None)
        self._read += 1
        if batch is None or self._read == self._size:
            del self._iterators[0]
            self._ended.add(epoch)
        return batch


def _packed(arrays: Arrays) -> Frame[pb.NextBatchResponse]:
    buffers: list[pickle.PickleBuffer] = []
    header = pb.NextBatchResponse(arrays=pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append))
    return Frame(header, {str(place): np.asarray(buffer.raw()) for place, buffer in enumerate(buffers)})


def unpacked(frame: Frame[pb.NextBatchResponse]) -> Sequence[Any] | None:
    """Copies of the arrays in an answer; None if there are none because the epoch has ended."""
    if not frame.header.arrays:
        return None
    buffers = [aligned_copy(frame.tensors[str(place)]) for place in range(len(frame.tensors))]
    arrays: Sequence[Any] = pickle.loads(frame.header.arrays, buffers=buffers)
    return arrays
