"""Replication: a server's neighbour keeps, in memory, all acknowledged changes that its recovery files lack.

A server sends each change to the next server before answering the call, in the form of the call (primary-backup with an
operation log). The neighbour computes nothing. The replacement of a lost server reads the recovery files and replays
the log in order, with the original code. Changes contained in the files are dropped from the log.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elasticcb.errors import ConnectionLostError, ElasticCBError, HandlerError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.recovery import RecoveryLog
from elasticcb.ps.replica_log import Entry, Origin, ReplicaLogs
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.security.credentials import Access

logger = logging.getLogger(__name__)

# Continue unreplicated if the neighbour is silent this long.
_DEADLINE_SECONDS = 30.0
_BEGIN_SECONDS = 5.0
_PATIENCE_SECONDS = 5.0  # timeout for the neighbour with the log of a lost server
_PAGE_BYTES = 64 << 20  # size of a page when reading a log
# Recovery files are written once the log is as large as they are, and at least this large.
_SMALLEST_LOG = 512 << 20  # bytes


class Replica:
    """This server's log on its neighbour.

    A change is noted while it is made, under the model's lock, and confirmed after the lock is released: one change is
    sent while the next is made, and changes of several workers may be sent together.

    Args:
        address: address of the neighbour, "host:port"; "" while that is also lost.

    Attributes:
        noted: number of the last change.
    """

    def __init__(self, origin: Origin, files: RecoveryLog, address: str, access: Access) -> None:
        self._origin, self._files, self._access = origin, files, access
        self._stream = secrets.randbits(62) + 1
        self._state = threading.Lock()
        self._sending = threading.Lock()  # never acquired while holding `_state` or the model's lock
        self._pending: list[Entry] = []
        self._sizes: deque[tuple[int, int]] = deque()  # (number, bytes) of changes not yet in recovery files
        self._size = 0
        self._written = 0
        self._begun = 0  # number of logs requested
        self._active = False  # whether the neighbour has all changes since the log started
        self._confirmed = 0  # changes up to this number need no waiting
        self._closed = False
        self._address = address
        self._connection = self._connected(address)
        self.noted = 0

    def _connected(self, address: str) -> Connection | None:
        name = f"the neighbour of parameter server {self._origin.server}"
        return Connection(address, name, 0.0, self._access) if address else None

    # -------------------------------------------------------------- in training

    def note(self, method: str, header: Any, tensors: Mapping[str, Array]) -> None:
        """A call has changed the model. Called under the model's lock; call `confirm` before answering."""
        with self._state:
            self.noted += 1
            if self._active:
                header = header.SerializeToString()
                self._pending.append(Entry(self.noted, method, header, tensors))

    def confirm(self, number: int) -> None:
        """Returns when the neighbour has the changes up to `number`, or replication has stopped.

        Raises `ConnectionLostError` when this server is closed first.
        """
        if not self._active or number <= self._confirmed:
            return
        with self._sending:  # another thread may be sending them
            if self._closed:
                raise self._over
            with self._state:
                entries, self._pending = self._pending, []
                written = self._written
            if entries and self._active:
                try:
                    self._send(_DEADLINE_SECONDS, entries, first=entries[0].number, written=written)
                except ElasticCBError as error:
                    self._go_on_without(error)
                else:
                    self._add_sizes(entries)
            self._confirmed = max(number, self._confirmed)

    @property
    def _over(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"Parameter server {self._origin.server} is closed and can't confirm its last changes. Retry with its "
            "replacement."
        )

    @property
    def is_full(self) -> bool:
        """Whether recovery files should be written, to shorten the log."""
        return self._size > _SMALLEST_LOG and self._size > self._files.whole_bytes

    def _send(self, seconds: float, entries: Sequence[Entry] = (), **more: Any) -> None:
        if self._connection is None:
            raise ConnectionLostError(f"The neighbour of parameter server {self._origin.server} is lost.")
        request = pb.ReplicateRequest(run=self._origin.run, index=self._origin.server, stream=self._stream, **more)
        self._connection.call(PS_METHODS["Replicate"], packed(request, entries), seconds)

    def _add_sizes(self, entries: Iterable[Entry]) -> None:
        with self._state:
            for entry in entries:
                self._sizes.append((entry.number, entry.bytes))
                self._size += entry.bytes

    def _go_on_without(self, error: ElasticCBError) -> None:
        """Marks the files as incomplete before any pending call is answered."""
        if self._closed:
            raise self._over from error
        self._stop()
        logger.warning(
            "%s Parameter server %d continues without a replica until its neighbour answers.",
            error,
            self._origin.server,
        )

    def _stop(self) -> None:
        self._files.set_replicated(False)  # first, because afterwards no call waits for the log
        with self._state:
            self._active = False
            self._pending.clear()
            self._sizes.clear()
            self._size = 0

    # -------------------------------------------------------------- with the recovery files

    def begin(self) -> None:
        """Starts a log at the neighbour if there is none. It becomes valid once the files are written after that."""
        if self._active:
            return
        with self._sending:
            try:
                self._begun += 1
                self._send(_BEGIN_SECONDS, begin=self._begun)
            except ElasticCBError as error:
                logger.debug("Could not start a replica log: %s", error)
                return
            with self._state:
                self._active = True

    def written(self, number: int) -> None:
        """The files contain the changes up to `number`. Raises `CheckpointError` when they can't be marked."""
        with self._state:
            self._written = number
            while self._sizes and self._sizes[0][0] <= number:
                self._size -= self._sizes.popleft()[1]
        if self._active and not self._files.is_replicated:
            with self._sending:
                if self._active:
                    self._files.set_replicated(True)
                    logger.info("Replicating to the neighbour at %s", self._address)

    def follow(self, address: str) -> None:
        """The neighbour is now another process."""
        with self._sending:
            if address != self._address:
                self._stop()
                self._hang_up()
                self._address = address
                self._connection = self._connected(address)

    def close(self) -> None:
        self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()

    # -------------------------------------------------------------- replacing a lost server

    def go_on(self, number: int, replay: Callable[[Entry], bool]) -> bool:
        """Replays the changes that the files lack, and continues the log.

        Args:
            number: number of the last change in the files.
            replay: replays a change; False when it can't.

        Returns whether everything that the lost server had acknowledged was restored.
        """
        self.noted = self._written = number
        if not self._files.is_replicated:
            logger.warning("The lost server had no replica.")
            return False
        complete = self._connection is not None and self._replay_all(self._connection, replay)
        if complete:
            self._active = True
        else:
            self._files.set_replicated(False)
        return complete

    def _replay_all(self, connection: Connection, replay: Callable[[Entry], bool]) -> bool:
        while True:
            request = pb.ReadLogRequest(
                run=self._origin.run, index=self._origin.server, stream=self._stream, after=self.noted
            )
            try:
                page = connection.call(PS_METHODS["ReadLog"], Frame(request, {}), _DEADLINE_SECONDS, _PATIENCE_SECONDS)
            except (ConnectionLostError, HandlerError, WireError) as error:
                logger.warning("The replica log of the lost server can't be read: %s", error)
                return False
            if not page.header.found:
                logger.warning("The neighbour at %s has no log that continues the recovery files.", self._address)
                return False
            entries = unpacked(page, self.noted + 1)
            if not entries:
                return True
            for entry in entries:
                if not replay(entry):
                    logger.warning(
                        "Change %d of the replica log, by %s, can't be replayed.", entry.number, entry.method
                    )
                    return False
                self.noted = entry.number
            self._add_sizes(entries)


def packed(header: Any, entries: Iterable[Entry]) -> Frame[Any]:
    """A message with log entries; their arrays are not copied."""
    tensors: dict[str, Array] = {}
    for place, entry in enumerate(entries):
        header.entries.add(method=entry.method, header=entry.header)
        tensors |= {f"{place}/{name}": array for name, array in entry.tensors.items()}
    return Frame(header, tensors)


def unpacked(frame: Frame[Any], first: int) -> list[Entry]:
    """The entries of a message, numbered from `first`. Raises `WireError` for arrays of no entry."""
    tensors: list[dict[str, Array]] = [{} for _ in frame.header.entries]
    for name, array in frame.tensors.items():
        place, _, rest = name.partition("/")
        if not place.isdecimal() or int(place) >= len(tensors):
            raise WireError(f"A replica log has a tensor named {name!r}; expected K/NAME with K below {len(tensors)}.")
        tensors[int(place)][rest] = array
    return [
        Entry(first + place, entry.method, entry.header, tensors[place])
        for place, entry in enumerate(frame.header.entries)
    ]


class Neighbours:
    """Keeps the logs of other servers; handles their calls."""

    def __init__(self) -> None:
        self._logs = ReplicaLogs()
        self._lock = threading.Lock()

    def replicate(self, frame: Frame[pb.ReplicateRequest]) -> Frame[Any]:
        request = frame.header
        origin, entries = Origin(request.run, request.index), unpacked(frame, request.first)
        with self._lock:
            if request.begin:
                self._logs.begin(origin, request.stream, request.begin)
            self._logs.add(origin, request.stream, entries, request.written)
        return Frame(pb.ReplicateResponse(), {})

    def read_log(self, frame: Frame[pb.ReadLogRequest]) -> Frame[Any]:
        request = frame.header
        with self._lock:
            entries = self._logs.take_over(
                Origin(request.run, request.index), request.stream, request.after, _PAGE_BYTES
            )
        return packed(pb.ReadLogResponse(found=entries is not None), entries or ())
