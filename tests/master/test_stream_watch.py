"""What a stream's periods of event time are, for what its source tells."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest

from elasticcb.data.unbounded import Partition
from elasticcb.master import stream_watch
from elasticcb.master.stream_watch import StreamWatch
from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue

NOW = 7_000.0


@pytest.fixture
def period_of(monkeypatch):
    """A function that returns the end of the first period of a source whose records have these times."""
    monkeypatch.setattr(stream_watch, "time", SimpleNamespace(time=lambda: NOW))

    def found(times):
        queue = TaskQueue(
            QueueSettings(records_per_task=20, minibatch_size=10, num_epochs=9, grows=True, event_time=60.0)
        )
        watch = StreamWatch.__new__(StreamWatch)  # without its thread
        watch._source = SimpleNamespace(
            time_of=lambda name, offset: times[offset],
            offset_at=lambda name, time: next((place for place, own in enumerate(times) if own >= time), None),
        )
        watch._master = SimpleNamespace(state=lambda: contextlib.nullcontext(SimpleNamespace(queue=queue)))
        return watch._period({"a": Partition(0, 0, len(times))})

    return found


def test_a_period_has_the_first_record_that_waits(period_of):
    assert period_of([130.0, 170.0, 200.0]) == (180.0, {"a": 2})


@pytest.mark.parametrize("time", [0.0, -0.001, -90_000.0, math.nan, math.inf, 9e9])
def test_a_record_without_a_time_that_can_be_counts_as_if_it_had_come_now(period_of, time):
    period = period_of([time, 100.0])
    assert period.end == 7_020.0
    assert period.offsets == {}
