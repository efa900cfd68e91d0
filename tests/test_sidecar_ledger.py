"""Which checkpoint is next, decided without a clock and without files."""

from __future__ import annotations

from elasticcb.sidecar.follower import CheckpointKind, Ledger, ListedCheckpoint, Signature


def version(number, modified=1):
    return ListedCheckpoint(f"version-{number:08}", CheckpointKind.VERSION, Signature(modified, 10, number), number)


def file(name, modified, size=10, inode=1):
    return ListedCheckpoint(name, CheckpointKind.KERAS, Signature(modified, size, inode), modified)


def all_of(ledger, sightings, now=0.0):
    return list(iter(lambda: ledger.take(sightings, now), None))


def test_an_older_version_that_comes_late_is_given_too():
    ledger = Ledger(1.0)
    all_of(ledger, [version(20)])
    assert ledger.take([version(10), version(20)], 1.0) == version(10)


def test_a_version_that_was_written_again_is_given_again():
    ledger = Ledger(1.0)
    all_of(ledger, [version(20, modified=1)])
    assert all_of(ledger, [version(20, modified=2)]) == [version(20, modified=2)]


def test_a_file_is_given_when_it_has_stayed_the_same_for_long_enough():
    ledger = Ledger(1.0)
    assert ledger.take([file("a", 5)], 10.0) is None
    assert ledger.take([file("a", 5, size=20)], 10.9) is None  # it grows
    assert ledger.take([file("a", 5, size=20)], 11.8) is None
    assert ledger.take([file("a", 5, size=20)], 11.9) == file("a", 5, size=20)
    assert ledger.take([file("a", 5, size=20)], 13.0) is None


def test_a_file_that_is_overwritten_is_given_each_time():
    ledger = Ledger(1.0)
    given = []
    for now, written in enumerate([file("a", 1), file("a", 2), file("a", 2, inode=7), file("a", 2, inode=7, size=5)]):
        assert ledger.take([written], 10.0 * now) is None
        given.append(ledger.take([written], 10.0 * now + 1))
    assert given == [file("a", 1), file("a", 2), file("a", 2, inode=7), file("a", 2, inode=7, size=5)]


def test_files_come_in_order_of_their_time_and_then_of_their_names():
    ledger = Ledger(0.0)
    files = [file("b", 7), file("c", 3), file("a", 7)]
    assert [found.path for found in all_of(ledger, files)] == ["c", "a", "b"]


def test_a_file_that_is_being_written_holds_nothing_up():
    ledger = Ledger(1.0)
    ledger.take([file("old", 1)], 0.0)
    assert ledger.take([file("old", 1), file("new", 2)], 1.0) == file("old", 1)
    assert ledger.take([file("old", 1), file("new", 2), version(3)], 1.5) == version(3)
