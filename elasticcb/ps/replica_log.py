"""What a parameter server keeps for its neighbours: the changes that their recovery files do not hold yet.

Pure, and not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elasticcb.errors import ElasticCBError
from elasticcb.rpc.tensors import Array

_OVERHEAD = 1024  # bytes of an entry besides its arrays, about


class Entry(NamedTuple):
    """A call that changed a server.

    Attributes:
        number: of the change, from 1.
        method: of the call.
        header: of the call, as protobuf.
        tensors: of the call, as it came.
    """

    number: int
    method: str
    header: bytes
    tensors: Mapping[str, Array]

    @property
    def bytes(self) -> int:
        return _OVERHEAD + len(self.header) + sum(array.nbytes for array in self.tensors.values())


class Origin(NamedTuple):
    """Whose changes: a server of a training."""

    run: str
    server: int


class _Log:
    def __init__(self, stream: int, number: int) -> None:
        self.stream, self.number = stream, number
        self.entries: deque[Entry] = deque()
        self.dropped: int | None = None  # the last number that is not kept any more; None: nothing came yet


class ReplicaLogs:
    """The logs of other servers.

    A log belongs to the process that began it, or that went on with it last; what another one sends is refused.
    """

    def __init__(self) -> None:
        self._logs: dict[Origin, _Log] = {}
        self._gone: dict[Origin, set[int]] = {}  # processes that had a log, and were replaced

    def begin(self, origin: Origin, stream: int, number: int) -> None:
        """Forgets what was kept of `origin`; process `stream` goes on, with its log of this `number`, from 1.

        Raises `ElasticCBError` when the process has begun a later one meanwhile, or was replaced: the call is late.
        """
        log = self._logs.get(origin)
        begun = log.number if log is not None and log.stream == stream else 0
        if number <= begun or stream in self._gone.get(origin, ()):
            raise ElasticCBError(f"Parameter server {origin.server} asked too late for a log of its changes.")
        self._replace(origin, stream)
        self._logs[origin] = _Log(stream, number)

    def _replace(self, origin: Origin, stream: int) -> None:
        log = self._logs.get(origin)
        if log is not None and log.stream != stream:
            self._gone.setdefault(origin, set()).add(log.stream)

    def add(self, origin: Origin, stream: int, entries: Sequence[Entry], written: int) -> None:
        """Keeps `entries`, and lets those up to number `written` go.

        Raises `ElasticCBError` when they do not follow on what is kept.
        """
        log = self._logs.get(origin)
        if log is None or log.stream != stream:
            raise ElasticCBError(
                f"Changes of parameter server {origin.server} came from a process that has no log here. It has to "
                "begin one; this server may have been restarted."
            )
        if entries and log.dropped is None:
            log.dropped = entries[0].number - 1
        last = log.entries[-1].number if log.entries else log.dropped
        for entry in entries:
            if last is None or entry.number != last + 1:
                raise ElasticCBError(
                    f"Change {entry.number} of parameter server {origin.server} came after {last}; none may be missing."
                )
            log.entries.append(entry)
            last = entry.number
        while log.entries and log.entries[0].number <= written:
            log.dropped = log.entries.popleft().number

    def take_over(self, origin: Origin, stream: int, after: int, most_bytes: int) -> list[Entry] | None:
        """The entries behind number `after`, as many as `most_bytes` hold and at least one; process `stream` goes on
        with the log. None when there is no log, or entries behind `after` are missing."""
        log = self._logs.get(origin)
        if log is None or (log.dropped is not None and log.dropped > after):
            return None
        self._replace(origin, stream)
        if log.stream != stream:
            log.stream, log.number = stream, 0
        found: list[Entry] = []
        size = 0
        for entry in log.entries:
            if entry.number <= after:
                continue
            size += entry.bytes
            if found and size > most_bytes:
                break
            found.append(entry)
        return found
