"""What a master writes down, so that another can go on with its job after it was killed.

An append-only file of JSON values, each on a line behind its checksum (CRC-32). A line goes to the operating system
before what it tells of is answered: it survives the end of any process. `rewrite`, once an epoch, forces the file onto
the disk.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elasticcb.errors import JobFailedError
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.bucket_map import BucketMap

logger = logging.getLogger(__name__)

States = dict[str, list[Array]]  # by metric
_LARGE_BYTES = 32 << 20


@dataclass
class Memory:
    """What the entries of a journal tell together.

    Attributes:
        run: names the training, in the recovery files of the servers.
        next_id: of processes; lower ones were given out.
        workers: how many the job was scaled to; 0: it never was.
        autoscale: whether that may still go by itself, if it was asked for.
        buckets, map_version: of the map by which the servers hold the model, if their number has changed: what
            `BucketMap.to_bytes` gives, as hex digits.
        queue: `TaskQueue.to_dict`; None: no task was handed out yet.
        version: of the model, at least.
        states: by epoch that is not ended, the metric states of each training task that was done.
        ended_epochs: epochs before it are ended: the hooks of their end have run.
        evaluated: the version that the last finished evaluation round saw.
        learning_rate: the base rate when training began, or when the last epoch had ended and the next one had begun;
            None: a schedule rules it.
        epoch_begun: whether `on_epoch_begin` has run for the epoch after those that are ended.
        learning_rate_before: the base rate before that.
        logs: of the last epoch that ended.
        callbacks: of each on the master, what `saved_states` gave at the end of the last epoch.
        callback_arrays: the file with the arrays among it (`CallbackArrays.keep`); None: there are none.
        totals: what the summary tells beside the queue's accounting, of all masters of the job.
        over: the job was done.
        roster: `Roster.to_dict`; None: nobody was there yet.
        servers: of each parameter server that held the model, by place, its address and its id.
        merging_units: as in `Master`.
        evaluation_round: the last one that was begun; 0: none.
    """

    run: str = ""
    next_id: int = 1
    workers: int = 0
    autoscale: bool = True
    buckets: str = ""
    map_version: int = 0
    queue: dict[str, Any] | None = None
    version: int = 0
    states: dict[int, list[States]] = field(default_factory=dict)
    ended_epochs: int = 0
    evaluated: int | None = None
    learning_rate: float | None = None
    epoch_begun: bool = False
    learning_rate_before: float | None = None
    logs: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    callback_arrays: dict[str, Any] | None = None
    totals: dict[str, Any] = field(default_factory=dict)
    over: bool = False
    roster: dict[str, Any] | None = None
    servers: list[Any] = field(default_factory=list)
    merging_units: list[str] = field(default_factory=list)
    evaluation_round: int = 0

    def bucket_map(self) -> BucketMap | None:
        """That of the servers; None: the even one."""
        if not self.buckets:
            return None
        return BucketMap.from_bytes(len(self.servers), bytes.fromhex(self.buckets), self.map_version)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Takes one entry in."""
        for name in entry.keys() & vars(self).keys() - {"states", "queue"}:
            setattr(self, name, entry[name])
        if "queue" in entry:
            self.queue = {**(self.queue or {}), **entry["queue"]}
        for epoch, states in entry.get("states", ()):
            self.states.setdefault(epoch, []).append({name: [_array(a) for a in given] for name, given in states})
        for epoch in [epoch for epoch in self.states if epoch < self.ended_epochs]:
            del self.states[epoch]


def _plain_states(states: Sequence[tuple[int, Mapping[str, Sequence[Array]]]]) -> list[Any]:
    """Metric states of training tasks, each behind its epoch, as JSON values."""
    return [
        [epoch, [[name, [_plain(array) for array in arrays]] for name, arrays in by_name.items()]]
        for epoch, by_name in states
    ]


class Journal:
    """The journal of a job.

    Args:
        path: of the file; what it holds is read first.

    Attributes:
        memory: what the entries told that were there.
        damaged: whether entries are missing, beyond a last one that was torn.

    Raises `JobFailedError` when the file can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.memory = Memory()
        self.damaged = False
        self._latest: dict[str, Any] = {}  # of each value but states
        try:
            good = self._read()
            self._file = path.open("ab", buffering=0)
            self._file.truncate(good)
            self._size = good
        except OSError as error:
            raise JobFailedError(f"The journal {path} can't be opened: {error}.") from error

    def _read(self) -> int:
        """Takes in all whole entries; returns where they end."""
        good = 0
        if not self._path.exists():
            return good
        with self._path.open("rb") as file:
            for line in file:
                checksum, _, text = line.partition(b" ")
                torn = not line.endswith(b"\n")
                if torn or checksum != _checksum(text):
                    logger.warning(
                        "The journal %s is damaged from byte %d on; what is before it counts", self._path, good
                    )
                    self.damaged = not torn
                    break
                entry = json.loads(text)
                self.memory.add(entry)
                self._note(entry)
                good += len(line)
        return good

    def _note(self, entry: Mapping[str, Any]) -> None:
        queue = {**self._latest.get("queue", {}), **entry.get("queue", {})}
        self._latest.update((name, value) for name, value in entry.items() if name != "states")
        if queue:
            self._latest["queue"] = queue

    def add(self, **entry: Any) -> None:
        """Writes an entry; of the queue, whose sources may be thousands, what has changed. "states" are the metric
        states of training tasks, each behind its epoch. Raises `JobFailedError` when that is not possible."""
        if "states" in entry:
            entry["states"] = _plain_states(entry["states"])
        if "queue" in entry:
            known = self._latest.get("queue", {})
            entry["queue"] = {k: value for k, value in entry["queue"].items() if k not in known or known[k] != value}
        self._note(entry)
        self._size += self._write(self._file, entry)

    @property
    def is_large(self) -> bool:
        """Whether it should be rewritten."""
        return self._size > _LARGE_BYTES

    def rewrite(self, states: Sequence[tuple[int, Mapping[str, Sequence[Array]]]]) -> None:
        """Replaces all entries by one, and forces it onto the disk.

        Args:
            states: metric states of all epochs that are not ended, each behind its epoch.
        """
        unfinished = self._path.with_name(f".tmp-{self._path.name}")
        try:
            file = unfinished.open("wb", buffering=0)
            self._size = self._write(file, {**self._latest, "states": _plain_states(states)})
            os.fsync(file.fileno())
            unfinished.rename(self._path)
        except OSError as error:
            raise JobFailedError(f"The journal {self._path} can't be written: {error}.") from error
        self._file.close()
        self._file = file

    def _write(self, file: Any, entry: Mapping[str, Any]) -> int:
        text = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            return int(file.write(_checksum(text) + b" " + text))
        except OSError as error:
            raise JobFailedError(f"The journal {self._path} can't be written: {error}. Make room.") from error

    def close(self) -> None:
        self._file.close()


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _plain(array: Array) -> list[Any]:
    array = np.asarray(array)
    return [array.dtype.name, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _array(plain: Sequence[Any]) -> Array:
    dtype, shape, data = plain
    return np.frombuffer(base64.b64decode(data), dtype_of(dtype)).reshape(shape)
