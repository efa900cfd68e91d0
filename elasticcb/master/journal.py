"""The journal from which another master resumes the job of a killed one.

An append-only file with one JSON value per line, preceded by its CRC-32 checksum. An entry is handed to the operating
system before the call it records is answered, so it survives the death of any process. `rewrite`, once an epoch,
replaces the file by a compacted one and syncs it to disk.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.errors import JobFailedError, ReplacedError
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.storage import durable
from elasticcb.storage.durable import NewerFormatError, refuse_newer

if TYPE_CHECKING:
    from elasticcb.master.job_copy import JobCopy

logger = logging.getLogger(__name__)

States = dict[str, list[Array]]  # by metric
_LARGE_BYTES = 32 << 20
_FORMAT = 2  # 1: without format and term


@dataclass
class Memory:
    """The combined content of a journal's entries.

    Attributes:
        term: term of the last master that wrote.
        run: name of the training in the servers' recovery files.
        began: when the job was started or resumed, in seconds since 1970.
        first_step: seconds from then to the first training step.
        next_id: next process id; lower ones were used.
        workers: number of workers after the last scaling; 0: never scaled.
        autoscale: whether autoscaling, if requested, is still on.
        map_version: of the shard map by which the servers hold the model; 0: their number has not changed.
        version: lower bound of the model's version.
        states: metric states of each finished training task, by epoch that has not ended.
        ended_epochs: the first epoch whose end hooks have not run; earlier ones have ended.
        evaluated: model version of the last finished evaluation pass.
        metrics: of that pass.
        evaluated_before: as in `JobMachine`, for that pass.
        learning_rate: the base rate, or the one that the servers are about to get; None with a schedule.
        epoch_begun: whether `on_epoch_begin` has run for the first epoch that has not ended.
        learning_rate_before: the base rate that this hook saw.
        callbacks: `saved_states` of each callback on the master at the end of the last epoch.
        callback_arrays: the file with their arrays (`CallbackArrays.keep`); None: none.
        totals: totals besides the queue's accounting, over all masters of the job.
        roster: `Roster.to_dict`; None: no process had registered.
        servers: address and id of each parameter server that held the model, by index.
        merging_units: as `EpochStates.merging`.
        evaluation_round: the last round that began; 0: none.
    """

    term: int = 0
    run: str = ""
    began: float = 0.0
    first_step: float | None = None
    next_id: int = 1
    workers: int = 0
    autoscale: bool = True
    map_version: int = 0
    queue: dict[str, Any] | None = None
    version: int = 0
    states: dict[int, list[States]] = field(default_factory=dict)
    ended_epochs: int = 0
    evaluated: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluated_before: int = 0
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

    @property
    def begun(self) -> bool:
        """Whether the job has handed out tasks."""
        return self.queue is not None

    def add(self, entry: Mapping[str, Any]) -> None:
        """Applies one entry."""
        for name in entry.keys() & vars(self).keys() - {"states", "queue"}:
            setattr(self, name, entry[name])
        if "queue" in entry:
            self.queue = {**(self.queue or {}), **entry["queue"]}
        for epoch in entry.get("restarted", ()):
            self.states.pop(epoch, None)
        for epoch, states in entry.get("states", ()):
            self.states.setdefault(epoch, []).append({name: [_array(a) for a in given] for name, given in states})
        for epoch in [epoch for epoch in self.states if epoch < self.ended_epochs]:
            del self.states[epoch]


def _plain_states(states: Sequence[tuple[int, Mapping[str, Sequence[Array]]]]) -> list[Any]:
    """Metric states of training tasks with their epochs, as JSON values."""
    return [
        [epoch, [[name, [_plain(array) for array in arrays]] for name, arrays in by_name.items()]]
        for epoch, by_name in states
    ]


class Journal:
    """The journal of a job.

    Each master starts a new file with its own term. A replaced master still has the old file open, and can't write any
    more.

    Args:
        path: journal file; its content is read first. A missing file is created; an existing one is left unchanged
            until `begin`, or the first entry.

    Attributes:
        term: number of this master, from 1.
        copy: of the job's folder below a URL; None: it has none.

    Raises `JobFailedError` when the file is damaged, of a later release, or can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.copy: JobCopy | None = None
        self.memory = Memory()
        self._latest: dict[str, Any] = {}  # by value; without states
        self._descriptor: int | None = None  # of the file of this master
        self._size = self._compacted = 0  # bytes now, and after the last compaction
        self._failure: JobFailedError | None = None
        try:
            is_there = path.exists()
            if is_there:
                self._read()
        except OSError as error:
            raise JobFailedError(f"The journal {path} could not be opened: {error}.") from error
        except NewerFormatError as error:
            raise JobFailedError(str(error)) from error
        self.term = self.memory.term + 1
        if not is_there:
            self._replace([])

    def _read(self) -> None:
        """Reads all entries. A truncated last entry is ignored: its call was never answered."""
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
                    logger.warning(
                        "The last entry of the journal %s, from byte %d, is incomplete and was ignored",
                        self._path,
                        good,
                    )
                    break
                good += len(line)
        if not good:
            raise self._damaged(good)

    def _damaged(self, good: int) -> JobFailedError:
        if not self._path.stat().st_size:
            return JobFailedError(
                f"The journal {self._path} is empty. If the job ended before its first batch, run its original command "
                "again. Otherwise, restore the journal from a backup. Nothing was changed."
            )
        cut = (
            f" To resume from the last entry before the damage, truncate the file: `truncate --size={good} "
            f"{shlex.quote(str(self._path))}`. Work that was done after that entry is repeated."
            if good
            else ""
        )
        return JobFailedError(
            f"The journal {self._path} is damaged from byte {good:,} on: a checksum does not match. Nothing was "
            "changed, and the other files of the job are intact. Restore the journal from a backup and resume the "
            "job; or start a new job in another folder from the newest checkpoint."
            f"{cut}"
        )

    def _note(self, entry: Mapping[str, Any]) -> None:
        queue = {**self._latest.get("queue", {}), **entry.get("queue", {})}
        self._latest.update((name, value) for name, value in entry.items() if name not in ("states", "restarted"))
        if queue:
            self._latest["queue"] = queue

    def begin(self) -> None:
        """Makes the file this master's; earlier masters can't write any more. Raises the same errors as `add`."""
        if self._descriptor is None:
            earlier = [(epoch, states) for epoch, tasks in self.memory.states.items() for states in tasks]
            self._replace(_plain_states(earlier))

    def add(self, state: Mapping[str, Any] | None = None, /, **facts: Any) -> None:
        """Appends an entry, unless there is nothing new.

        Args:
            state: `JobMachine.to_dict`; only what has changed is written, also within the queue, which may have
                thousands of sources.
            facts: fields of `Memory`; "states" are the metric states of training tasks, each with its epoch, and
                "restarted" epochs that lose their earlier ones.

        Raises `JobFailedError` on failure, and at every later call: no entry may be skipped.
        """
        self.begin()
        assert self._descriptor is not None
        state = dict(state or {})
        queue = _changes(state.pop("queue", {}), self._latest.get("queue", {}))
        news = {**({"queue": queue} if queue else {}), **_changes(state, self._latest), **facts}
        if not news:
            return
        line = _line({**news, "states": _plain_states(news["states"])} if "states" in news else news)
        with self._writing():
            durable.append(self._descriptor, line)
        self._size += len(line)
        self._note(news)

    @property
    def is_large(self) -> bool:
        """Whether it should be compacted: it has grown by more than it had then."""
        return self._size > 2 * self._compacted + _LARGE_BYTES

    def rewrite(self, states: Sequence[tuple[int, Mapping[str, Sequence[Array]]]]) -> None:
        """Replaces all entries by one, and syncs it; `sync` completes the replacement.

        Args:
            states: metric states of all epochs that have not ended, each with its epoch.

        Raises the same errors as `add`; the old entries are kept in that case.
        """
        self._replace(_plain_states(states))

    def _replace(self, plain_states: list[Any]) -> None:
        line = _line({**self._latest, "format": _FORMAT, "term": self.term, "states": plain_states})
        self.check_is_ours()
        with self._writing():
            durable.write(self._path, line, sync_names=False)
            self.close()
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = self._compacted = len(line)

    def sync(self) -> None:
        """Returns once the rewritten file would survive a crash of the machine. Raises `JobFailedError`."""
        with self._writing():
            durable.sync(self._path.parent)

    def check_is_ours(self) -> None:
        """Raises `ReplacedError` when another master has started its own file; else the same errors as `add`."""
        if self._descriptor is not None:
            with self._writing():
                durable.append(self._descriptor, b"")

    def check_not_replaced(self) -> None:
        """Raises `ReplacedError` like `check_is_ours`, and no other error."""
        try:
            self.check_is_ours()
        except ReplacedError:
            raise
        except JobFailedError as error:
            logger.debug("%s", error)  # reported by the operation that failed

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A failed write ends the job."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except (durable.ReplacedFileError, OSError) as error:
            self._failure = self._why(error)
            raise self._failure from error

    def _why(self, error: Exception) -> JobFailedError:
        with contextlib.suppress(OSError):
            if self._descriptor is not None and not self._path.parent.exists():
                return JobFailedError(f"The job's folder {self._path.parent} was removed while the job was running.")
            if isinstance(error, durable.ReplacedFileError) or (
                self._descriptor is not None and not os.fstat(self._descriptor).st_nlink
            ):
                # The master that replaces this one also removes its unfinished files.
                return ReplacedError(
                    f"Another master took over the job in {self._path.parent}; this one (term {self.term}) exits."
                )
        return JobFailedError(
            f"The journal {self._path} can't be written: {error}. Its entries are intact. Free disk space, or make it "
            "writable."
        )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def memory_in(path: Path) -> Memory:
    """What is in a journal, without beginning one; nothing if there is none. Raises `JobFailedError` like `Journal`."""
    return Journal(path).memory if os.path.isfile(path) else Memory()


def _changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of `now` that differ from those of `before`."""
    return {
        name: value
        for name, value in now.items()
        if name not in before or (before[name] is not value and before[name] != value)
    }


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
