"""The input of a worker whose stream does not answer at first."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from elasticcb.data import read
from elasticcb.data.unbounded import Partition, UnboundedSource, checked_partitions
from elasticcb.errors import DataError, StreamError
from elasticcb.model import input_pipeline
from elasticcb.model.input_pipeline import FeedPipeline
from elasticcb.settings import Mode


class Numbers(UnboundedSource):
    element_spec = tf.TensorSpec((), tf.int64)

    def __init__(self):
        self.silent = 2

    def partitions(self, known):
        if self.silent:
            self.silent -= 1
            raise StreamError("The stream does not answer.")
        return {"a": Partition(start=0, first=0, end=10)}

    def read(self, name, start, end):
        yield from range(start, end)

    def beginning(self, records):
        self.partitions(())
        return "a", 0, records


@pytest.mark.parametrize("waits", [True, False])
def test_a_worker_waits_for_a_stream_and_a_new_job_does_not(monkeypatch, waits):
    monkeypatch.setattr(input_pipeline, "_LOOK_AGAIN_SECONDS", 0.0)
    batches = read(Numbers(), feed_batch=lambda records, mode, metadata: (records, records)).batches("training", 4)
    pipeline = FeedPipeline(batches, Mode.TRAINING, 4, waits=waits)
    if waits:
        assert pipeline.first_batch()[0].numpy().tolist() == [0, 1, 2, 3]
    else:
        with pytest.raises(StreamError):
            pipeline.first_batch()


class Told(Numbers):
    def __init__(self, told):
        self.told = told

    def partitions(self, known):
        return self.told


def test_offsets_of_partitions_may_be_numpy_integers():
    found = checked_partitions(Told({"a": Partition(np.int64(1), np.int32(2), np.int64(3), np.uint8(4))}), ())
    assert found == {"a": Partition(1, 2, 3, 4)}
    json.dumps(found["a"].end)


@pytest.mark.parametrize("wrong", [None, ["a"], {"a": 5}, {0: Partition(0, 0, 5)}, {"a": Partition(0, 0, 5.0)}])
def test_partitions_that_can_t_be_used_are_an_error(wrong):
    with pytest.raises(DataError, match=r"Told\.partitions\(\) returned .*Expected a dict"):
        checked_partitions(Told(wrong), ())
