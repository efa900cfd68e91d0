"""Attributes that several processes share."""

import argparse
import itertools
import pickle
import types

import keras
import numpy as np

from elasticcb.callbacks.shared_attributes import SharedAttributes, without_traces


class Data:
    def __init__(self, seen):
        self.seen = seen


def test_what_is_undone_stays_the_object_that_others_refer_to():
    seen = [1, 2]
    data = Data(seen)
    attributes = SharedAttributes({1: data})
    seen.append(3)
    attributes.undo(was_built=True)
    assert data.seen is seen
    assert seen == [1, 2]


class Pair(tuple):
    def __new__(cls, first, second):
        if second != 2 * first:
            raise ValueError(second)
        return super().__new__(cls, (first, second, first))


def test_what_cannot_be_copied_is_compared_by_its_identity():
    data = Data(Pair(1, 2))
    attributes = SharedAttributes({1: data})
    assert not attributes.changed()
    data.seen = 4
    assert [change.now for change in attributes.changed().values()] == [4]


def test_namespaces_and_random_generators_are_followed():
    def held():
        return {
            1: argparse.Namespace(alpha=1.0),
            2: types.SimpleNamespace(beta=[1]),
            3: Data(np.random.default_rng(0)),
            4: Data(np.random.RandomState(0)),
        }

    ours, theirs = held(), held()
    here, there = SharedAttributes(ours), SharedAttributes(theirs)
    assert not there.changed()
    theirs[1].alpha = 2.0
    theirs[2].beta.append(2)
    draws = [ours[number].seen for number in (3, 4)]
    drawn = [theirs[number].seen.normal() for number in (3, 4)]
    here.adopt(there.changed())
    assert (ours[1].alpha, ours[2].beta) == (2.0, [1, 2])
    assert [ours[number].seen for number in (3, 4)] == draws
    assert [each.normal() for each in draws] == [theirs[number].seen.normal() for number in (3, 4)] != drawn
    here.undo(was_built=True)
    assert (ours[1].alpha, [each.normal() for each in draws]) == (1.0, drawn)


def test_generators_in_containers_and_iterators_are_followed():
    def held():
        generators = [np.random.default_rng(0), np.random.RandomState(0)]
        return {
            1: Data(generators),
            2: Data(itertools.count(5, 2)),
            3: Data({"a": (iter([1, 2, 3]), itertools.cycle("ab"))}),
        }

    ours, theirs = held(), held()
    here, there = SharedAttributes(ours), SharedAttributes(theirs)
    generators, (first, second) = ours[1].seen, ours[1].seen
    drawn = [each.normal() for each in theirs[1].seen]
    assert [next(each) for each in (theirs[2].seen, *theirs[3].seen["a"])] == [5, 1, "a"]
    theirs[2].rng = np.random.default_rng(3)
    here.adopt(pickle.loads(pickle.dumps(there.changed())))
    assert ours[1].seen is generators
    assert [id(each) for each in generators] == [id(first), id(second)]
    assert [each.normal() for each in generators] == [each.normal() for each in theirs[1].seen] != drawn
    assert [next(each) for each in (ours[2].seen, *ours[3].seen["a"])] == [7, 2, "b"]
    assert ours[2].rng.normal() == theirs[2].rng.normal()


STEPS, SEEN = 0, [0]


def count():
    global STEPS
    STEPS += 1


class Counting(keras.Model):
    def call(self, x):
        count()
        SEEN.append(1)
        return x


def test_trying_a_model_leaves_the_globals_of_its_functions():
    model = Counting()
    model.built = True
    with without_traces(model):
        model(np.ones((1, 1), "float32"))
        assert (STEPS, SEEN) == (1, [0, 1])
    assert (STEPS, SEEN) == (0, [0])


results: list[int] = []


class Collector:
    def collect(self):
        self.results.append(1)


def test_an_attribute_is_not_the_global_of_the_same_name():
    attributes = SharedAttributes({1: Collector.collect})
    results.append(1)
    assert not attributes.changed()
