"""What servers write for serving: everything, and what training has changed since."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open

from elasticcb.errors import CheckpointError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame
from elasticcb.settings import EmbeddingOptions, WhenFull
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.array_names import GONE
from elasticcb.sharding.partition import ServerPlace
from elasticcb.sharding.table_state import TableSpec, whole
from helpers_ps import read_part
from helpers_ps_lost import IDS, INITIALIZER, ON_DISK, SPECS, VALUES

TABLE = 3
EVICTING = EmbeddingOptions(memory_bytes=420, when_full=WhenFull.EVICT)  # all rows but five
AGED = (*SPECS[:TABLE], replace(SPECS[TABLE], table=TableSpec(None, INITIALIZER, 7, TableOptions(max_age=4)).to_json()))


class Follower:
    """What one knows who has read the files of a server."""

    def __init__(self, servers, folder):
        self._servers, self._folder, self._numbers = servers, folder, itertools.count(1)
        self._initial = servers.worker.lookup({TABLE: IDS})[TABLE]
        self.known, self.rows, self.weights = "", {}, {}

    def request(self, whole=False, folder=None, unchanged=False):
        number = next(self._numbers)
        path = (folder or self._folder) / f"{number}.safetensors"
        request = pb.SaveRequest(
            path=str(path), after=self.known, serving=True, whole=str(path.with_suffix(".whole")) if whole else "",
            unchanged=unchanged,
        )  # fmt: skip
        return path, self._servers.master.servers.links[0].call("Save", Frame(request, {})).header

    def follow(self):
        """Asks for what has changed; returns the ids of the rows that came, and of those that were removed."""
        path, answer = self.request()
        assert answer.after == self.known
        if not answer.file:
            return None
        self.known = path.name
        part = read_part(path)
        with safe_open(path, framework="np") as file:
            name = f"{GONE}/{TABLE}"
            gone = file.get_tensor(name).tolist() if name in file.keys() else []  # noqa: SIM118
        for id in gone:
            self.rows.pop(id, None)
        table = whole(part.tables[TABLE])
        assert not table.slots
        assert not part.optimizers.slots
        self.rows.update(zip(table.ids.tolist(), table.rows, strict=True))
        self.weights = part.weights
        return table.ids.tolist(), gone

    def begin(self):
        """Asks for everything."""
        path, answer = self.request(whole=True)
        assert answer.whole.file == f"{path.stem}.whole"
        part = read_part(path.with_suffix(".whole"))
        table = whole(part.tables[TABLE])
        self.known, self.weights = path.name, part.weights
        self.rows = dict(zip(table.ids.tolist(), table.rows, strict=True))
        return answer

    def check(self):
        *weights, rows = self._servers.held()
        for index, expected in enumerate(weights):
            np.testing.assert_array_equal(self.weights[index], expected)
        known = [self.rows.get(id, initial) for id, initial in zip(IDS.tolist(), self._initial, strict=True)]
        np.testing.assert_array_equal(known, rows)


@pytest.mark.parametrize(
    ("more", "loses"),
    [({}, False), ({"embedding": EVICTING}, True), ({"embedding": ON_DISK}, False), ({"specs": AGED}, True)],
    ids=["all stay", "evicted", "on disk", "aged"],
)
def test_followers_have_what_the_server_has_whatever_happens_in_between(losing, tmp_path, more, loses):
    servers = losing(**more)
    follower, random, removed = Follower(servers, tmp_path), np.random.default_rng(0), 0
    follower.begin()
    for step in range(60):
        for _ in range(random.integers(0, 3)):
            servers.push(step, tuple(random.choice(IDS, 3, replace=False).tolist()))
        if random.random() < 0.3:
            servers.worker.lookup({TABLE: random.choice(IDS, 2, replace=False)}, create=True)  # but not trained
        if random.random() < 0.3:
            servers.write()  # for recovery, which has its own files
        if random.random() < 0.3:
            with pytest.raises(CheckpointError):
                follower.request(folder=tmp_path / "is not there", unchanged=True)
        if random.random() < 0.1:
            answer = follower.begin()
            assert answer.file  # also what has changed, for those who have the one before
        elif random.random() < 0.7:
            removed += len((follower.follow() or ([], []))[1])
        else:
            continue
        follower.check()
    assert (removed > 0) == loses


def test_rows_that_were_only_looked_up_are_not_sent_and_nothing_is_written_without_changes(losing, tmp_path):
    servers = losing()
    follower = Follower(servers, tmp_path)
    servers.push(0, (1, 2, 3))
    follower.begin()
    assert follower.follow() is None
    servers.worker.lookup({TABLE: np.array([1, 2])}, create=True)
    servers.push(1, (2, 5))
    assert follower.follow() == ([2, 5], [])
    path, answer = follower.request(unchanged=True)
    assert answer.file == path.name
    assert whole(read_part(path).tables[TABLE]).ids.tolist() in ([], [2, 5])


def test_a_server_that_was_replaced_or_given_weights_says_that_it_does_not_know_the_file_before(losing, tmp_path):
    servers = losing()
    follower = Follower(servers, tmp_path)
    servers.push(0)
    servers.write()
    follower.begin()
    servers.push(1)
    path, answer = follower.request()
    assert answer.after
    servers.replace(version=2)
    servers.master.servers.connect(servers.master.servers.known[0], ServerPlace(*servers.find(0)))
    path, answer = follower.request()
    assert not answer.file
    assert not answer.after
    assert not path.exists()
    answer = follower.begin()
    assert not answer.file
    follower.check()
    servers.master.load_state(VALUES, None)
    assert not follower.request()[1].after
