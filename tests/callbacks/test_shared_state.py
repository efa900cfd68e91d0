from __future__ import annotations

import functools
import random
import threading
from collections import Counter, deque

import keras
import numpy as np

from elasticcb.callbacks.shared_attributes import Placed
from elasticcb.callbacks.shared_state import SharedState, SharedVariables

totals: list[int] = []
first: list[int] = []
second: list[int] = []


def counted(batches):
    def hook(self, batch, logs=None):
        batches.append(batch)

    return hook


class Tracker:
    def __init__(self):
        self.values = {"a": 1}

    def track(self, name):
        self.values[name] = 2


class Callback(keras.callbacks.Callback):
    def __init__(self, given):
        super().__init__()
        self.given, self.data = given, np.zeros(1 << 18)
        self.tracker, self.weight = Tracker(), keras.Variable(1.0)
        self.last, self.mean = deque([1], maxlen=3), keras.metrics.Mean()

    on_test_batch_end, on_predict_batch_end = counted(first), counted(second)

    def on_train_batch_end(self, batch, logs=None):
        self.given.append(batch)
        totals.append(batch)
        self.count = Counter(a=batch)

    def on_epoch_end(self, epoch, logs=None):
        print(self.given, self.data.sum())


def _state(callback):
    return SharedState([Placed(callback, [], [])], True, None, SharedVariables({}))


def test_state_that_comes_back_changes_the_objects_that_others_refer_to() -> None:
    given, there = [1], Callback([])
    here = Callback(given)
    tracker, weight, mean = here.tracker, here.weight, here.mean
    rest = here.rest = there.rest = iter(x for x in ())
    lock, there.lock = threading.Lock(), threading.Lock()
    here.lock = lock
    there.given, there.average, there.alias = [1, 2], [np.ones(2)], None
    there.alias = there.given
    there.tracker.values["b"] = 2
    there.weight.assign(3.0)
    there.last.append(2)
    there.mean.update_state(4.0)
    totals[:], first[:], second[:] = [5], [6], [7]
    data, left = _state(there).dump()
    for each in (totals, first, second):
        each.clear()
    before, here.data = here.data, here.data + 1
    state = _state(here)
    state.adopt(state.read(data))
    assert left == [{"data": "", "rest": "generator"}]
    assert here.rest is rest
    assert here.lock is lock
    assert here.given is given is here.alias
    assert given == [1, 2]
    assert here.tracker is tracker
    assert tracker.values == {"a": 1, "b": 2}
    assert here.weight is weight
    assert float(weight) == 3.0
    assert here.last == deque([1, 2], maxlen=3)
    assert (totals, first, second) == ([5], [6], [7])
    assert here.mean is mean
    assert float(mean.result()) == 4.0
    np.testing.assert_array_equal(here.average[0], np.ones(2))
    assert here.data.sum() == before.size  # large, and changed by no hook: it stays where it is


class Table:
    """With methods that variables also have."""

    shape = (1,)

    def assign(self, **columns):
        return self


def test_generators_tables_and_what_functions_are_bound_to_come_back() -> None:
    here, there = Callback([]), Callback([])
    rows, tracker = [], here.tracker
    here.draws, there.draws = (np.random.default_rng(0) for _ in range(2))
    here.table, there.table = Table(), Table()
    here.add, there.add = functools.partial(list.append, rows), functools.partial(list.append, [])
    here.track, there.track = here.tracker.track, there.tracker.track
    draws = here.draws
    there.add(1)
    there.track("b")
    there.draws.random()
    there.table.rows = 2
    drawn = np.random.random(), random.random()
    np.random.seed(1)
    random.seed(1)
    data = _state(there).dump()[0]
    expected = np.random.random(), random.random(), there.draws.random()
    assert drawn != expected[:2]
    state = _state(here)
    state.adopt(state.read(data))
    assert here.draws is draws
    assert (np.random.random(), random.random(), draws.random()) == expected
    assert (rows, tracker.values, here.table.rows) == ([1], {"a": 1, "b": 2}, 2)


class Client:
    """Has any attribute, and a slot besides its other ones."""

    __slots__ = ("__dict__", "sent")

    def __init__(self, sent):
        self.sent, self.name = sent, "client"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: self


def test_objects_that_have_any_attribute_or_slots_are_taken_whole() -> None:
    here, there = Callback([]), Callback([])
    here.client, there.client = Client(1), Client(2)
    state = _state(here)
    state.adopt(state.read(_state(there).dump()[0]))
    assert (type(here.client), here.client.sent, here.client.name) == (Client, 2, "client")


def test_keras_continues_with_the_random_numbers_of_the_other_process() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    drawn = [float(keras.random.normal(())) for _ in range(3)]
    keras.utils.set_random_seed(3)
    keras.random.normal(())
    data, _ = _state(Callback([])).dump()
    keras.utils.clear_session()
    random.seed(7)
    here = _state(Callback([]))
    here.adopt(here.read(data))
    assert [float(keras.random.normal(())) for _ in range(2)] == drawn[1:]
