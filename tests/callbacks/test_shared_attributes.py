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
    attributes.undo()
    assert data.seen is seen
    assert seen == [1, 2]
