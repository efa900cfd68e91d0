"""The ranges of partitions that grow, as training tasks. Pure; times are arguments, in seconds of one clock."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from elasticcb.data.unbounded import Partition
from elasticcb.errors import DataError
from elasticcb.master.shards import Shard
from elasticcb.master.task import QueueSettings

_LINGER_SECONDS = 1.0  # for which less than a batch waits for more records
_KEPT_ENDS = 100  # of periods, for epochs whose hooks come later
_PATIENCE = 8  # draws by others that a partition waits for its reader, which may be lost
_PREFIX = "stream/"  # of keys of saved partitions: one each, because an entry of the journal has what has changed


class Period(NamedTuple):
    """A period of event time, whose records are an epoch.

    Attributes:
        end: seconds since the epoch of the clock.
        offsets: by partition, the offset after its last record; without an offset, more may come.
    """

    end: float
    offsets: Mapping[str, int]


@dataclass
class _Growing:
    """A partition.

    Attributes:
        position: offset of the next record to hand out.
        end: after the newest record to train.
        until: after the last record of the period; None: not known yet.
        id: as of `Partition`.
        since: when the oldest record was seen that is not handed out.
        reader: the worker that drew its last range.
        passed: draws since then for which it was the next one, but another was taken.
    """

    position: int
    stop: int | None
    end: int = 0
    until: int | None = None
    id: str = ""
    since: float = 0.0
    reader: int | None = None
    passed: int = 0

    @property
    def waiting(self) -> int:
        return max(self.end - self.position, 0)

    @property
    def has_ended(self) -> bool:
        return self.stop is not None and self.position >= self.stop

    @property
    def limits(self) -> list[int]:
        """Where the partition ends, and its part of the period, as far as is known."""
        return [each for each in (self.stop, self.until) if each is not None]

    @property
    def is_at_limit(self) -> bool:
        return any(self.position >= each for each in self.limits)


class StreamRanges:
    """Draws ranges like `ShardOrder`, as records come, in epochs.

    Whole batches are drawn at once; a smaller rest waits for more records for a while. Partitions take turns, but a
    worker gets those that it read before: its readers continue, and what they have read ahead is used.

    Attributes:
        event_time: as in `QueueSettings`.
        records, all_records: drawn in this epoch, and in all.
        lost: records that were removed.
        period: where the present period of event time ends, or else the last one; 0: there was none.
        in_period: whether there is a present one; without, nothing is drawn.
        period_ends: of the last epochs.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self._settings, self.event_time = settings, settings.event_time
        self.records = self.all_records = self.lost = 0
        self._partitions: dict[str, _Growing] = {}
        self._turns: dict[str, None] = {}  # names of those with waiting records, the next one first
        self._now = 0.0
        self._worker = 0  # that asks
        self._epoch_ended = False
        self.period = 0.0
        self.in_period = False
        self.period_ends: dict[int, float] = {}

    # ------------------------------------------------------------ growing

    def grow(self, seen: Mapping[str, Partition], now: float, period: Period | None) -> str:
        """What is there by now; of a new period of event time, or of the present one. Returns a message about records
        that were lost; "": none.

        Raises `DataError` for lost records, unless they are skipped.
        """
        self._now = now
        stories = []
        for name, found in seen.items():
            known = self._partitions.get(name)
            if known is None:
                known = self._partitions[name] = _Growing(found.start, found.stop)
            known.id = known.id or found.id
            if found.id not in ("", known.id):
                raise DataError(f"{name} was deleted and created again, while the job read it. Start a new job.")
            if found.end < known.position and (known.stop is None or found.end < known.stop):
                raise DataError(
                    f"{name} ends at offset {found.end:,}, but the job has read up to {known.position:,}: it was "
                    "deleted and created again, or cut. Start a new job."
                )
            if known.position < found.first and not known.has_ended:
                stories.append(self.lose(Shard(name, known.position, found.first)))
                known.position = found.first
            known.stop = found.stop if known.stop is None else known.stop
            end = max(found.end, known.end)
            if end > known.end and not known.waiting:
                known.since = now
            known.end = end if known.stop is None else min(end, known.stop)
            if known.waiting:
                self._turns.setdefault(name)
            else:
                self._turns.pop(name, None)
        if period is not None:
            self._bound(period)
        return " ".join(stories)

    def lose(self, gone: Shard) -> str:
        """These records were removed before they were trained; like `grow`."""
        text = f"{gone.records:,} records of {gone.name}, from offset {gone.start:,}, were removed before being trained"
        if not self._settings.skips_lost:
            raise DataError(
                f"{text}: its retention is shorter than the job's lag. Raise it; to continue without these records, "
                "set lost_offsets to skip."
            )
        self.lost += gone.records
        return f"{text}; the job continues without them."

    @property
    def has_ended(self) -> bool:
        """Whether all records up to where the job ends have been handed out."""
        if self._settings.most is not None and self.all_records >= self._settings.most:
            return True
        return bool(self._partitions) and all(each.has_ended for each in self._partitions.values())

    @property
    def names(self) -> set[str]:
        return set(self._partitions)  # of files, there may be many

    # ------------------------------------------------------------ epochs

    def begin_epoch(self, epoch: int) -> None:
        self.records, self._epoch_ended = 0, False
        if self.in_period:
            self.period_ends[epoch] = self.period
            self.period_ends.pop(epoch - _KEPT_ENDS, None)

    def end_epoch(self) -> bool:
        """The epoch has no more records; not before it has some. Returns whether it ends."""
        self._epoch_ended = self._epoch_ended or self.records > 0
        return self._epoch_ended

    def _bound(self, period: Period) -> None:
        if period.end != self.period if self.in_period else period.end <= self.period:
            return  # it is over
        if not self.in_period:
            self.period, self.in_period = period.end, True
            for each in self._partitions.values():
                each.until = None
        for name, offset in period.offsets.items():
            each = self._partitions[name]
            each.until = max(offset, each.position) if each.until is None else each.until
        self._end_period()

    def _end_period(self) -> None:
        """Ends the epoch if all records of its period are handed out."""
        parts = self._partitions.values()
        if self.in_period and all(each.is_at_limit for each in parts):
            self._epoch_ended, self.in_period = True, False

    @property
    def left(self) -> int:
        """0 when the epoch has no more records; else 1: their number is not known."""
        full = 0 < self._settings.records_per_epoch <= self.records
        return int(not (self._epoch_ended or full or self.has_ended))

    # ------------------------------------------------------------ drawing

    def asked_by(self, worker: int, now: float) -> None:
        self._worker, self._now = worker, now

    @property
    def is_ready(self) -> bool:
        """Whether there is a range to draw now."""
        return self._next() is not None

    @property
    def waiting(self) -> int:
        """Records that are there and not drawn."""
        return sum(each.waiting for each in self._partitions.values())

    def draw(self) -> Shard:
        """The next range. Raises `IndexError` when there is none now."""
        name = self._next()
        if name is None:
            raise IndexError("no range is ready")
        growing = self._partitions[name]
        for other in itertools.takewhile(lambda other: other != name, self._turns):
            self._partitions[other].passed += bool(self._ready(self._partitions[other]))
        growing.reader, growing.passed = self._worker, 0
        count = self._ready(growing)
        if self._settings.records_per_epoch:
            count = min(count, self._settings.records_per_epoch - self.records)
        if self._settings.most is not None:
            count = min(count, self._settings.most - self.all_records)
        shard = Shard(name, growing.position, growing.position + count)
        growing.position = shard.end
        growing.since = self._now
        self.records += count
        self.all_records += count
        self._end_period()
        if not self._settings.in_order or not growing.waiting:
            del self._turns[name]
        if growing.waiting:
            self._turns.setdefault(name)
        return shard

    def _next(self) -> str | None:
        if self._settings.in_order:  # of files, there may be many
            first = next((name for name in self._turns if not self._partitions[name].is_at_limit), None)
            return first if first is not None and self._ready(self._partitions[first]) else None
        found = [name for name in self._turns if self._ready(self._partitions[name])]
        return next(filter(self._suits, found), found[0] if found else None)

    def _suits(self, name: str) -> bool:
        """Whether the worker that asks should continue with this partition, or begin to read it."""
        growing = self._partitions[name]
        if growing.reader in (None, self._worker) or growing.passed >= _PATIENCE:
            return True
        readers = [each.reader for each in self._partitions.values()]
        share = len(readers) // len({*readers, self._worker} - {None})
        return readers.count(self._worker) < share < readers.count(growing.reader)

    def _ready(self, growing: _Growing) -> int:
        """Records of a partition to draw now."""
        if self.event_time and not self.in_period:
            return 0
        end, most = min([growing.end, *growing.limits]), self._settings.records_per_task
        count = min(max(end - growing.position, 0), most)
        holds_up = self._settings.in_order and len(self._turns) > 1  # the next file
        is_last = end in growing.limits or holds_up or self._now - growing.since >= _LINGER_SECONDS
        return count if is_last or count == most else count - count % self._settings.minibatch_size

    # ------------------------------------------------------------ lag, and saving

    @property
    def positions(self) -> dict[str, int]:
        """By partition: the offset of the next record to hand out."""
        return {name: each.position for name, each in self._partitions.items()}

    @property
    def ends(self) -> dict[str, int]:
        """By partition: the offset after the newest record to train."""
        return {name: max(each.end, each.position) for name, each in self._partitions.items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        saved = {
            f"{_PREFIX}{name}": [each.position, each.stop, each.end, each.until, each.id]
            for name, each in self._partitions.items()
        }
        epoch = [self.records, self.all_records, self._epoch_ended, self.period, self.in_period]
        return saved | {"stream_epoch": epoch, "stream_lost": self.lost, "stream_periods": [*self.period_ends.items()]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the state saved by `to_dict`."""
        for key, value in saved.items():
            if key.startswith(_PREFIX):
                name = key.removeprefix(_PREFIX)
                growing = self._partitions[name] = _Growing(*value)
                if growing.waiting:
                    self._turns[name] = None
        self.records, self.all_records, self._epoch_ended, self.period, self.in_period = saved["stream_epoch"]
        self.lost, self.period_ends = saved["stream_lost"], dict(saved["stream_periods"])
