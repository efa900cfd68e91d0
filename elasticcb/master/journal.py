"""What a master writes down, so that another can go on with its job after it was killed.

An append-only file of JSON values, each on a line behind its checksum (CRC-32). A line goes to the operating system
before what it tells of is answered: it survives the end of any process. `rewrite`, once an epoch, puts a new file in
its place, and onto the disk.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elasticcb.errors import JobFailedError, ReplacedError
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.bucket_map import BucketMap
from elasticcb.storage import durable
from elasticcb.storage.durable import NewerFormatError, refuse_newer

logger = logging.getLogger(__name__)

States = dict[str, list[Array]]  # by metric
_LARGE_BYTES = 32 << 20
_FORMAT = 2  # before, no entry told the format and the term


@dataclass
class Memory:
    """What the entries of a journal tell together.

    Attributes:
        term: of the last master that wrote.
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
        learning_rate_at_end: the base rate when the hooks of an epoch's end were called; None: they have run, or were
            not called yet.
        logs: of the last epoch that ended.
        callbacks: of each on the master, what `saved_states` gave at the end of the last epoch.
        callback_arrays: the file with the arrays among it (`CallbackArrays.keep`); None: there are none.
        totals: what the summary tells beside the queue's accounting, of all masters of the job.
        over: the job was done.
        roster: `Roster.to_dict`; None: nobody was there yet.
        servers: of each parameter server that held the model, by place, its address and its id.
        merging_units: as `EpochStates.merging`.
        evaluation_round: the last one that was begun; 0: none.
    """

    term: int = 0
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
    learning_rate_at_end: float | None = None
    logs: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    callback_arrays: dict[str, Any] | None = None
    totals: dict[str, Any] = field(default_factory=dict)
    over: bool = False
    roster: dict[str, Any] | None = None
    servers: list[Any] = field(default_factory=list)
    merging_units: list[str] = field(default_factory=list)
    evaluation_round: int = 0

    @property
    def undone_learning_rate(self) -> float | None:
        """The base rate before hooks of epochs that run again, which may have changed it; None: no hooks do."""
        return self.learning_rate_at_end if self.epoch_begun else self.learning_rate

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

    Each master begins with a file of its own, which tells its term: one that it has replaced still holds the file
    before, and can't write any more.

    Args:
        path: of the file; what it holds is read first. It is made if it is missing, else left as it is until
            `begin`, or the first entry.

    Attributes:
        memory: what the entries told that were there.
        term: number of this master, from 1.

    Raises `JobFailedError` when the file is damaged, of a later release, or can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.memory = Memory()
        self._latest: dict[str, Any] = {}  # of each value but states
        self._descriptor: int | None = None  # of the file of this master
        self._size = 0
        self._failure: JobFailedError | None = None
        try:
            is_there = path.exists()
            if is_there:
                self._read()
        except OSError as error:
            raise JobFailedError(f"The journal {path} can't be opened: {error}.") from error
        except NewerFormatError as error:
            raise JobFailedError(str(error)) from error
        self.term = self.memory.term + 1
        if not is_there:
            self._replace([])

    def _read(self) -> None:
        """Takes in all entries; a last one that was cut off while it was written was never answered for."""
        good = 0
        with self._path.open("rb") as file:
            for line in file:
                checksum, _, text = line.partition(b" ")
                whole = line.endswith(b"\n")
                if whole and checksum == _checksum(text):
                    entry = json.loads(text)
                    refuse_newer(self._path, entry.get("format", 1), _FORMAT)
                    self.memory.add(entry)
                    self._note(entry)
                elif whole or not good or checksum == _checksum(text[:-1] + b"\n"):
                    raise self._damaged(good)
                else:
                    logger.warning("The last entry of the journal %s, from byte %d on, was cut off", self._path, good)
                    break
                good += len(line)
        if not good:
            raise self._damaged(good)

    def _damaged(self, good: int) -> JobFailedError:
        if not self._path.stat().st_size:
            return JobFailedError(
                f"The journal {self._path} is empty. If the job ended before its first batch, begin it again with the "
                "command that began it; else put back a copy of the journal. Nothing was changed."
            )
        cut = (
            f" To go on with what is before the damage, cut the rest off: `truncate --size={good} "
            f"{shlex.quote(str(self._path))}`; what the job did after that is done again."
            if good
            else ""
        )
        return JobFailedError(
            f"The journal {self._path} is damaged from byte {good:,} on: it does not hold what was written to it. "
            "Nothing was changed, and all other files of the job are as they were. Put back a copy of it, and go on as "
            "before; or begin a new job, in another folder, from the newest checkpoint (--checkpoint_dir_for_init)."
            f"{cut}"
        )

    def _note(self, entry: Mapping[str, Any]) -> None:
        queue = {**self._latest.get("queue", {}), **entry.get("queue", {})}
        self._latest.update((name, value) for name, value in entry.items() if name != "states")
        if queue:
            self._latest["queue"] = queue

    def begin(self) -> None:
        """Makes the file this master's; who has written it before can't any more. Raises `JobFailedError` as `add`."""
        if self._descriptor is None:
            earlier = [(epoch, states) for epoch, tasks in self.memory.states.items() for states in tasks]
            self._replace(_plain_states(earlier))

    def add(self, **entry: Any) -> None:
        """Writes an entry; of the queue, whose sources may be thousands, what has changed. "states" are the metric
        states of training tasks, each behind its epoch.

        Raises `JobFailedError` when that is not possible, and at each call after that: no entry may be left out.
        """
        self.begin()
        assert self._descriptor is not None
        if "states" in entry:
            entry["states"] = _plain_states(entry["states"])
        if "queue" in entry:
            known = self._latest.get("queue", {})
            entry["queue"] = {k: value for k, value in entry["queue"].items() if k not in known or known[k] != value}
        line = _line(entry)
        with self._writing():
            durable.append(self._descriptor, line)
        self._size += len(line)
        self._note(entry)

    @property
    def is_large(self) -> bool:
        """Whether it should be rewritten."""
        return self._size > _LARGE_BYTES

    def rewrite(self, states: Sequence[tuple[int, Mapping[str, Sequence[Array]]]]) -> None:
        """Replaces all entries by one, and forces it onto the disk; under its name after `sync`.

        Args:
            states: metric states of all epochs that are not ended, each behind its epoch.

        Raises `JobFailedError` as `add`; the entries are still there then.
        """
        self._replace(_plain_states(states))

    def _replace(self, plain_states: list[Any]) -> None:
        line = _line({**self._latest, "format": _FORMAT, "term": self.term, "states": plain_states})
        self.check_is_ours()
        with self._writing():
            durable.write(self._path, line, sync_names=False)
            self.close()
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = len(line)

    def sync(self) -> None:
        """Returns when what was rewritten is what a machine has that ends now. Raises `JobFailedError`."""
        with self._writing():
            durable.sync(self._path.parent)

    def check_is_ours(self) -> None:
        """Raises `ReplacedError` when another master has begun a file of its own; `JobFailedError` as `add`."""
        if self._descriptor is not None:
            with self._writing():
                durable.append(self._descriptor, b"")

    def check_not_replaced(self) -> None:
        """Raises `ReplacedError` as `check_is_ours`, and nothing else."""
        try:
            self.check_is_ours()
        except ReplacedError:
            raise
        except JobFailedError as error:
            logger.debug("%s", error)  # told by what has failed

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """What can't be written is the end of the job."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except (durable.ReplacedFileError, OSError) as error:
            self._failure = self._why(error)
            raise self._failure from error

    def _why(self, error: Exception) -> JobFailedError:
        with contextlib.suppress(OSError):
            if isinstance(error, durable.ReplacedFileError) or (
                self._descriptor is not None and not os.fstat(self._descriptor).st_nlink
            ):
                # Who replaces this master removes what it was writing, too.
                return ReplacedError(
                    f"Another master goes on with the job in {self._path.parent}; this one, of term {self.term}, ends."
                )
        return JobFailedError(
            f"The journal {self._path} can't be written: {error}. What it holds is whole. Make room, or let it be "
            "written to."
        )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _line(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
    return _checksum(text) + b" " + text


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _plain(array: Array) -> list[Any]:
    array = np.asarray(array)
    return [array.dtype.name, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _array(plain: Sequence[Any]) -> Array:
    dtype, shape, data = plain
    return np.frombuffer(base64.b64decode(data), dtype_of(dtype)).reshape(shape)
