"""Attributes that several processes share."""

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
