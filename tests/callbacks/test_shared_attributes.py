"""Attributes that several processes share."""

import argparse
import types

import numpy as np

from elasticcb.callbacks.shared_attributes import SharedAttributes


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


results: list[int] = []


class Collector:
    def collect(self):
        self.results.append(1)


def test_an_attribute_is_not_the_global_of_the_same_name():
    attributes = SharedAttributes({1: Collector.collect})
    results.append(1)
    assert not attributes.changed()
