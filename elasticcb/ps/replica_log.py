"""Logs that a parameter server keeps for its neighbours: changes that are not in their recovery files yet.

Pure, and not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elasticcb.errors import ElasticCBError
from elasticcb.rpc.tensors import Array

_OVERHEAD = 1024  # approximate bytes of an entry besides its arrays


class Entry(NamedTuple):
    """A call that changed a server.

    Attributes:
        number: number of the change, from 1.
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
        self.dropped: int | None = None  # the last number no longer kept; None: nothing received yet


class ReplicaLogs:
    """The logs of other servers.

    A log belongs to the process that started it, or last continued it; entries of other processes are refused.
    """

    def __init__(self) -> None:
        self._logs: dict[Origin, _Log] = {}
        self._gone: dict[Origin, set[int]] = {}  # replaced processes that had a log

    def begin(self, origin: Origin, stream: int, number: int) -> None:
        """Discards the log of `origin`; process `stream` starts a new one, with id `number`.

        Raises `ElasticCBError` when the process has started a later log, or was replaced: the call is late.
        """
        log = self._logs.get(origin)
        begun = log.number if log is not None and log.stream == stream else 0
        if number <= begun or stream in self._gone.get(origin, ()):
            raise ElasticCBError(f"Parameter server {origin.server} requested a replica log too late.")
        self._replace(origin, stream)
        self._logs[origin] = _Log(stream, number)

    def _replace(self, origin: Origin, stream: int) -> None:
        log = self._logs.get(origin)
        if log is not None and log.stream != stream:
            self._gone.setdefault(origin, set()).add(log.stream)

    def add(self, origin: Origin, stream: int, entries: Sequence[Entry], written: int) -> None:
        """Adds `entries`, and drops those up to number `written`.

        Raises `ElasticCBError` when they do not follow the last entry.
        """
        log = self._logs.get(origin)
        if log is None or log.stream != stream:
            raise ElasticCBError(
                f"Changes of parameter server {origin.server} came from a process without a log here. It must start "
                "one; this server may have been restarted."
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
        """The entries after number `after`, up to `most_bytes` but at least one; process `stream` continues the log.
        None when there is no log, or entries after `after` are missing."""
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
