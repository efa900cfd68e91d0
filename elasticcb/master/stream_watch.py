"""Looks at a stream several times a second, in a thread of its own: what has come, and how far training is behind."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping

from elasticcb.data.unbounded import Partition, UnboundedSource, checked_partitions
from elasticcb.errors import CallbackWarning, StreamError
from elasticcb.master.master_server import MasterServer
from elasticcb.master.snapshot import PartitionLag
from elasticcb.master.stream_ranges import Period

logger = logging.getLogger(__name__)

_TELL_SECONDS = 5.0  # between two looks at times of records, and commits of offsets
_TROUBLE_SECONDS = 5.0  # after which a warning says that the stream does not answer
_END_SECONDS = 5.0
_LATE_SECONDS = 5.0  # after a period of event time, for records on their way
_GROWS_SECONDS = 60.0  # in which a lag must grow to be worth a warning,
_GROWS_RECORDS_SHARE = 0.1  # by this share of the records that came


class StreamWatch:
    """Tells the job what is there of a stream, until `close`."""

    def __init__(self, source: UnboundedSource, master: MasterServer) -> None:
        self._source, self._master = source, master
        self._stopped = threading.Event()
        self._silent_since = 0.0  # 0: it answers
        self._told_at = 0.0
        self._before: tuple[float, int, int] | None = None  # time, lag, and records that had come, a minute ago
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(_END_SECONDS)
        self._source.close()

    def _run(self) -> None:
        while not self._stopped.wait(self._source.look_seconds):
            try:
                self._look()
                if self._silent_since:
                    logger.info("The stream answers again")
                self._silent_since = 0.0
            except StreamError as error:
                self._is_silent(error)
            except Exception as error:  # also of a user's own source
                logger.error("Looking at the stream failed", exc_info=error)
                if not self._stopped.is_set():  # else the source is being closed
                    self._master.fail(error)
                return

    def _is_silent(self, error: StreamError) -> None:
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        logger.debug("%s", error)
        if now - self._silent_since >= _TROUBLE_SECONDS:
            self._master.warn(CallbackWarning("the stream does not answer", f"{error} The job waits for it.", 0))

    def _look(self) -> None:
        with self._master.state() as state:
            known = set() if state.queue is None or state.queue.stream is None else state.queue.stream.names
        seen = checked_partitions(self._source, known)
        period = self._period(seen)
        with self._master.state() as state:
            if self._stopped.is_set():  # the next job may have begun
                return
            state.stream_grew(seen, time.monotonic(), period)
        if time.monotonic() - self._told_at >= _TELL_SECONDS:
            self._told_at = time.monotonic()
            self._tell()

    def _period(self, seen: Mapping[str, Partition]) -> Period | None:
        """The period of event time of the epoch, as far as is known by now; None: it has no record yet, or epochs don't
        end by event time. A record that comes after its period counts to the next one."""
        with self._master.state() as state:
            stream = None if state.queue is None else state.queue.stream
            if stream is None or not stream.event_time:
                return None
            seconds, in_period, end = stream.event_time, stream.in_period, stream.period
            positions, ends = stream.positions, stream.ends
        for name, found in seen.items():  # a source need not tell of those that have not grown
            positions[name] = max(positions.get(name, found.start), found.first)
            ends[name] = found.end if found.stop is None else min(found.end, found.stop)
        waiting = {name: offset for name, offset in positions.items() if offset < ends[name]}
        now = time.time()
        if not in_period:
            times = [min(self._time_of(*each) or now, now) for each in waiting.items()]
            if not times:
                return None
            end = max(min(times) // seconds * seconds, end) + seconds
        offsets = {name: self._source.offset_at(name, end) for name in positions}
        for name, offset in waiting.items():
            # After a record with a time in the future, no offset is found by time.
            later = offsets[name]
            if later is not None and later <= offset and not end <= self._time_of(name, offset) <= now:
                offsets[name] = None
        is_late = now > end + _LATE_SECONDS
        bounds = {name: ends[name] if offset is None and is_late else offset for name, offset in offsets.items()}
        return Period(end, {name: offset for name, offset in bounds.items() if offset is not None})

    def _time_of(self, name: str, offset: int) -> float:
        """When the record at an offset came; 0: unknown, as if the source tells no number, or one before 1970."""
        found = self._source.time_of(name, offset)
        return found if found > 0 else 0.0

    def _warn_if_it_grows(self, lag: int, come: int) -> None:
        now = time.monotonic()
        if self._before is None or now - self._before[0] >= _GROWS_SECONDS:
            before, self._before = self._before, (now, lag, come)
            if before is not None and lag - before[1] > _GROWS_RECORDS_SHARE * (come - before[2]) > 0:
                text = (
                    f"Training doesn't keep up with the stream: in a minute, {come - before[2]:,} records came, and "
                    f"{lag - before[1]:,} more of them wait than before. Add workers, or use larger batches."
                )
                self._master.warn(CallbackWarning("the lag grows", text, 0))

    def _tell(self) -> None:
        """The lag of each partition, for people; and the trained offsets, for monitors of the source."""
        with self._master.state() as state:
            if state.queue is None or state.queue.stream is None:
                return
            trained, ends = state.queue.trained_to(saved=False), state.queue.stream.ends
            saved = state.queue.trained_to(saved=True)
        lags, now = {}, time.time()
        for name, offset in trained.items():
            records = ends[name] - offset
            if records or not self._source.in_order:  # else it is a file that is done
                since = self._time_of(name, offset) if records else 0.0
                seconds = max(now - since, 0.0) if since else 0.0
                lags[name] = PartitionLag(offset=offset, records=records, seconds=seconds)
        self._master.set_status(stream=lags)
        self._warn_if_it_grows(sum(lag.records for lag in lags.values()), sum(ends.values()))
        with contextlib.suppress(StreamError):
            self._source.trained(saved)
