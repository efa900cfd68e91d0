from __future__ import annotations

import threading
from collections import Counter, deque

import keras
import numpy as np

from elasticcb.callbacks.shared_state import SharedState, names_of

totals: list[int] = []


class Tracker:
    def __init__(self):
        self.values = {"a": 1}


class Callback(keras.callbacks.Callback):
    def __init__(self, given):
        super().__init__()
        self.given, self.data = given, np.zeros(1 << 18)
        self.tracker, self.weight = Tracker(), keras.Variable(1.0)
        self.last = deque([1], maxlen=3)

    def on_train_batch_end(self, batch, logs=None):
        self.given.append(batch)
        totals.append(batch)
        self.count = Counter(a=batch)

    def on_epoch_end(self, epoch, logs=None):
        print(self.given, self.data.sum())


def test_state_that_comes_back_changes_the_objects_that_others_refer_to() -> None:
    given, there = [1], Callback([])
    here = Callback(given)
    tracker, weight = here.tracker, here.weight
    here.lock, there.lock = threading.Lock(), threading.Lock()
    names = [names_of(here)]
    there.given, there.average, there.alias = [1, 2], [np.ones(2)], None
    there.alias = there.given
    there.tracker.values["b"] = 2
    there.weight.assign(3.0)
    there.last.append(2)
    totals[:] = [5]
    data, left = SharedState([there], None, names).dump()
    totals[:] = []
    before, here.data = here.data, here.data + 1
    state = SharedState([here], None)
    state.adopt(state.read(data))
    assert left == [{"lock": "lock"}]
    assert isinstance(here.lock, type(threading.Lock()))
    assert here.given is given is here.alias
    assert given == [1, 2]
    assert here.tracker is tracker
    assert tracker.values == {"a": 1, "b": 2}
    assert here.weight is weight
    assert float(weight) == 3.0
    assert here.last == deque([1, 2], maxlen=3)
    assert totals == [5]
    np.testing.assert_array_equal(here.average[0], np.ones(2))
    assert here.data.sum() == before.size  # large, and changed by no hook: it stays where it is
