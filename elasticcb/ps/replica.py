"""Nothing acknowledged is lost with a server: its neighbour keeps, in memory, what its recovery files lack.

A server sends each change to the next server before it answers it, as the call came (primary-backup with a log of
operations). The neighbour computes nothing. The server that takes the place of a lost one reads the recovery files and
makes the changes of the log again, in their order, with the code that made them first. What the files hold is dropped
from the log.
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

# A neighbour that has not answered for so long is gone on without.
_DEADLINE_SECONDS = 30.0
_BEGIN_SECONDS = 5.0
_PATIENCE_SECONDS = 5.0  # with one that has the log of a lost server
_PAGE_BYTES = 64 << 20  # of a log that is read
# The recovery files are written when the log is as large as they are, and at least so large.
_SMALLEST_LOG = 512 << 20  # bytes


class Replica:
    """The log of this server at its neighbour.

    A change is noted while it is made, under the lock of the model, and confirmed when that lock is free again: one
    change travels while the next is made, and those of several workers may travel together.

    Args:
        origin: this server.
        files: its recovery files, which tell a later process whether the log counts.
        address: of the neighbour, "host:port"; "" as long as it is lost, too.
        access: to the job.

    Attributes:
        noted: number of the last change.
    """

    def __init__(self, origin: Origin, files: RecoveryLog, address: str, access: Access) -> None:
        self._origin, self._files, self._access = origin, files, access
        self._stream = secrets.randbits(62) + 1
        self._state = threading.Lock()
        self._sending = threading.Lock()  # never taken while `_state`, or the lock of the model, is held
        self._pending: list[Entry] = []
        self._sizes: deque[tuple[int, int]] = deque()  # (number, bytes) of what is not written down
        self._size = 0
        self._written = 0
        self._begun = 0  # times that it has asked for a log
        self._active = False  # the neighbour has all changes since it became so
        self._confirmed = 0  # up to this number changes need not be waited for
        self._closed = False
        self._address = address
        self._connection = self._connected(address)
        self.noted = 0

    def _connected(self, address: str) -> Connection | None:
        name = f"the neighbour of parameter server {self._origin.server}"
        return Connection(address, name, 0.0, self._access) if address else None

    # -------------------------------------------------------------- in training

    def note(self, method: str, header: Any, tensors: Mapping[str, Array]) -> None:
        """A call has changed the model. Called under the model's lock; `confirm` before the call is answered."""
        with self._state:
            self.noted += 1
            if self._active:
                header = header.SerializeToString()
                self._pending.append(Entry(self.noted, method, header, tensors))

    def confirm(self, number: int) -> None:
        """Returns when the neighbour has the changes up to `number`, or is gone on without.

        Raises `ConnectionLostError` when this server is closed before.
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
            f"Parameter server {self._origin.server} is closed, so it can't answer for its last changes. Ask the "
            "server that takes its place."
        )

    @property
    def is_full(self) -> bool:
        """Whether the recovery files should be written, so that the log gets shorter."""
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
        """Before what is under way is answered, the files tell that there is more than they and the log hold."""
        if self._closed:
            raise self._over from error
        self._stop()
        logger.warning("%s Parameter server %d has no replica until one answers.", error, self._origin.server)

    def _stop(self) -> None:
        self._files.set_replicated(False)  # first: without a log nobody waits for it any more
        with self._state:
            self._active = False
            self._pending.clear()
            self._sizes.clear()
            self._size = 0

    # -------------------------------------------------------------- with the recovery files

    def begin(self) -> None:
        """Begins a log at the neighbour if there is none. It counts when the files have been written after that."""
        if self._active:
            return
        with self._sending:
            try:
                self._begun += 1
                self._send(_BEGIN_SECONDS, begin=self._begun)
            except ElasticCBError as error:
                logger.debug("No log can be begun: %s", error)
                return
            with self._state:
                self._active = True

    def written(self, number: int) -> None:
        """The files hold the changes up to `number`. Raises `CheckpointError` when they can't tell of the log."""
        with self._state:
            self._written = number
            while self._sizes and self._sizes[0][0] <= number:
                self._size -= self._sizes.popleft()[1]
        if self._active and not self._files.is_replicated:
            with self._sending:
                if self._active:
                    self._files.set_replicated(True)
                    logger.info("The neighbour at %s keeps a log of what the recovery files lack", self._address)

    def follow(self, address: str) -> None:
        """Another process is the neighbour now."""
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

    # -------------------------------------------------------------- in the place of a lost server

    def go_on(self, number: int, replay: Callable[[Entry], bool]) -> bool:
        """Makes the changes again that the files lack, and goes on with the log.

        Args:
            number: of the last change that the files hold.
            replay: makes a change again; False when it can't.

        Returns whether these were all that the lost server had acknowledged.
        """
        self.noted = self._written = number
        if not self._files.is_replicated:
            logger.warning("The lost server had no replica when it was lost.")
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
                logger.warning("The log of the lost server can't be read: %s", error)
                return False
            if not page.header.found:
                logger.warning("The neighbour at %s has no log that goes on from the recovery files.", self._address)
                return False
            entries = unpacked(page, self.noted + 1)
            if not entries:
                return True
            for entry in entries:
                if not replay(entry):
                    logger.warning("Change %d of the log, by %s, can't be made again.", entry.number, entry.method)
                    return False
                self.noted = entry.number
            self._add_sizes(entries)


def packed(header: Any, entries: Iterable[Entry]) -> Frame[Any]:
    """A message with entries of a log; their arrays are not copied."""
    tensors: dict[str, Array] = {}
    for place, entry in enumerate(entries):
        header.entries.add(method=entry.method, header=entry.header)
        tensors |= {f"{place}/{name}": array for name, array in entry.tensors.items()}
    return Frame(header, tensors)


def unpacked(frame: Frame[Any], first: int) -> list[Entry]:
    """The entries in a message, numbered from `first` on. Raises `WireError` for arrays of no entry."""
    tensors: list[dict[str, Array]] = [{} for _ in frame.header.entries]
    for name, array in frame.tensors.items():
        place, _, rest = name.partition("/")
        if not place.isdecimal() or int(place) >= len(tensors):
            raise WireError(f"A log of changes holds a tensor named {name!r}; expected K/NAME, K below {len(tensors)}.")
        tensors[int(place)][rest] = array
    return [
        Entry(first + place, entry.method, entry.header, tensors[place])
        for place, entry in enumerate(frame.header.entries)
    ]


class Neighbours:
    """Keeps the logs of other servers, for their calls."""

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
