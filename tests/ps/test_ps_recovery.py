"""A server stops without a goodbye, and another goes on with its files."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from elasticcb.checkpoint import Part
from elasticcb.errors import CheckpointError, ConnectionLostError
from elasticcb.ps.partition import VariableSpec
from elasticcb.ps.recovery import RecoveryLog, Saved
from elasticcb.ps.server import PSServer
from elasticcb.ps_client import PSClient, Push, ServerReplacedError
from elasticcb.ps_control import PSControl, Source
from elasticcb.settings import CheckpointSettings, Command, JobSettings, ModelSettings
from elasticcb.table_spec import TableSpec
from elasticcb.table_state import TableState

INITIALIZER = json.dumps(keras.saving.serialize_keras_object(keras.initializers.RandomUniform()))
SPECS = (
    VariableSpec("dense/kernel", (6,), "float32", True),
    VariableSpec("norm/mean", (2,), "float32", False),
    VariableSpec("emb/embeddings", (0, 3), "float32", True, table=TableSpec(None, INITIALIZER, 7).to_json()),
)
VALUES = [np.arange(6, dtype=np.float32), np.zeros(2, np.float32), np.zeros((0, 3), np.float32)]


class Servers:
    """One server after another in the same place, and two clients that follow: a worker's and the master's."""

    def __init__(self, folder, interval=1000.0):
        self.settings = JobSettings(
            command=Command.TRAIN,
            name="test",
            directory=str(folder),
            model=ModelSettings(),
            checkpoint=CheckpointSettings(interval_seconds=interval),
        )
        self.server, self.id, self.restored = None, 0, []
        self.start()
        given = ([self.server.address], SPECS, True)
        self.master = PSControl(*given, ids=[self.id], patience_seconds=5.0)
        self.worker = PSClient(*given, client_id=1, ids=[self.id], find=lambda _: (self.server.address, self.id))
        self.master.initialize(Source(VALUES))

    def start(self):
        self.server, self.id = PSServer(self.settings, lambda count: [keras.optimizers.Adam(0.1)]), self.id + 1
        self.server.start()

    def replace(self, version=0, **more):
        """The server is gone at once: what it has not written is lost."""
        self.server.stop(0)
        self.start()
        given = {"version": version, "source": lambda: Source(VALUES), "evaluation_round": 0, "learning_rate": None}
        self.restored.append(self.master.restore(0, self.server.address, self.id, **{**given, **more}))

    def push(self, step, ids=(1, 2)):
        generator = np.random.default_rng(step)
        rows = {2: (np.array(ids), generator.normal(size=(len(ids), 3)).astype(np.float32))}
        dense = [{"float32": generator.normal(size=6).astype(np.float32)}]
        self.worker.lookup({2: np.array(ids)}, create=True)
        return self.worker.push(Push(dense, (0,), rows, [{"float32": np.full(2, 0.5, np.float32)}], 0.0), None)

    def write(self):
        self.server._servicer._writer.write()

    def held(self):
        self.worker.pull()
        rows = self.worker.lookup({2: np.arange(6)}, create=False)[2]
        return [self.worker.blocks[0]["weights/float32"], self.worker.blocks[0]["state/float32"], rows]

    def close(self):
        self.worker.close()
        self.master.close()
        self.server.stop(0)


@pytest.fixture
def start(tmp_path):
    started = []

    def make(name="job", **more):
        started.append(Servers(tmp_path / name, **more))
        return started[-1]

    yield make
    for servers in started:
        servers.close()


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def test_replaced_server_goes_on_as_the_lost_one_would_have(start):
    lost, undisturbed = start("lost"), start("undisturbed")
    for step, ids in enumerate([(0, 1), (1, 2), (3,), (0, 4)]):
        for servers in (lost, undisturbed):
            servers.push(step, ids)
        if step in (0, 1, 2):
            lost.write()  # all, then what changed, twice
        if step == 2:
            lost.replace(version=3)
    assert lost.restored[0].version == 3
    assert lost.worker.version == undisturbed.worker.version == 4
    assert_same(lost.held(), undisturbed.held())


def test_what_was_not_written_is_lost_and_versions_go_on(start):
    servers = start()
    servers.push(0)
    servers.write()
    before = servers.held()
    servers.push(1)
    servers.push(2, (5,))
    servers.replace(version=3)
    assert servers.restored[0].version == 1
    held = servers.held()
    assert_same(held, before)
    assert servers.push(3).version == 4


def test_retry_of_a_push_that_the_files_contain_is_not_applied_again(start):
    servers = start()
    servers.push(0)
    servers.write()
    before = servers.held()
    servers.replace(version=1)
    servers.worker._sequence -= 1  # as if the answer had been lost
    servers.push(0)
    assert_same(servers.held(), before)
    servers.push(1)
    assert not np.array_equal(servers.held()[0], before[0])


def test_learning_rate_and_snapshot_that_the_master_has_set_are_set_again(start):
    servers = start()
    servers.push(0)
    servers.write()
    servers.replace(version=1, learning_rate=0.01, evaluation_round=3)
    servers.push(1)
    assert servers.worker.learning_rate == pytest.approx(0.01)
    assert np.array_equal(servers.worker.pull_snapshot(3)[0]["weights/float32"], servers.held()[0]) is False


def test_state_that_the_master_sets_is_written_at_once(start):
    servers = start()
    servers.push(0)
    servers.master.load_state([np.full(6, 9.0, np.float32), np.ones(2, np.float32), np.zeros((1, 3), np.float32)], None)
    servers.replace()
    np.testing.assert_array_equal(servers.held()[0], np.full(6, 9.0))


def test_server_writes_by_itself(start):
    servers = start(interval=0.01)
    version = servers.push(0).version
    while servers.server._servicer._writer._version < version:
        pass  # the test's own time limit ends what does not
    servers.replace(version=version)
    assert servers.restored[0].version == version


def test_server_without_files_begins_anew(start, tmp_path):
    servers = start()
    servers.push(0)
    servers.write()
    (tmp_path / "job" / "recovery" / "ps-0" / "log.json").write_text("{}")
    servers.replace(version=5)
    assert (servers.restored[0].source, servers.restored[0].version) == ("the first weights", 0)
    np.testing.assert_array_equal(servers.held()[0], VALUES[0])
    assert servers.push(1).version == 6


def test_table_that_is_read_while_its_server_is_replaced_is_read_again(start):
    servers = start()
    servers.push(0, tuple(range(6)))
    servers.write()
    expected = servers.worker.weights()
    pieces = servers.worker.read_table(2, chunk_rows=2)
    next(pieces)
    servers.replace(version=1)
    with pytest.raises(ServerReplacedError, match=r"emb/embeddings.*Read it again"):
        list(pieces)
    assert_same(servers.worker.weights()[0], expected[0])


def test_client_that_nobody_tells_of_another_server_gives_up(start):
    servers = start()
    servers.worker._patience = 0.2
    servers.server.stop(0)
    with pytest.raises(ConnectionLostError, match="parameter server 0"):
        servers.worker.pull()


# ------------------------------------------------------------ the files


def saved(version, ids, worker=1):
    rows = np.full((len(ids), 2), version, np.float32)
    weights = {0: np.full(3, version, np.float32)}
    return Saved(Part(version, weights, tables={1: TableState(np.array(ids), rows)}), {worker: version})


def test_files_hold_the_last_of_each_row(tmp_path):
    log = RecoveryLog(tmp_path / "ps-0", "run")
    log.begin()
    for version, ids in ((1, [4, 0, 9]), (2, [0]), (3, [9, 7])):
        log.write(saved(version, ids), whole=version == 1)
    found = RecoveryLog(tmp_path / "ps-0", "run").read()
    assert found.answered == {1: 3}
    table = found.part.tables[1]
    assert dict(zip(table.ids.tolist(), table.rows[:, 0].tolist(), strict=True)) == {0: 2, 4: 1, 7: 3, 9: 3}
    np.testing.assert_array_equal(found.part.weights[0], [3, 3, 3])


def test_whole_file_replaces_those_before_it(tmp_path):
    log = RecoveryLog(tmp_path, "run")
    log.begin()
    for version in (1, 2, 3):
        log.write(saved(version, [version]), whole=version != 2)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert RecoveryLog(tmp_path, "run").read().part.tables[1].ids.tolist() == [3]


def test_damaged_file_ends_what_is_read_and_one_can_go_on_from_there(tmp_path, caplog):
    log = RecoveryLog(tmp_path, "run")
    log.begin()
    for version in (1, 2, 3):
        log.write(saved(version, [version]), whole=version == 1)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    log = RecoveryLog(tmp_path, "run")
    found = log.read()
    assert (found.part.version, found.answered) == (2, {1: 2})
    assert "is damaged" in caplog.text
    log.write(saved(4, [4]), whole=False)
    assert RecoveryLog(tmp_path, "run").read().part.tables[1].ids.tolist() == [1, 2, 4]


def test_files_of_another_training_are_refused(tmp_path):
    log = RecoveryLog(tmp_path, "run")
    log.begin()
    log.write(saved(1, [1]), whole=True)
    with pytest.raises(CheckpointError, match="another training"):
        RecoveryLog(tmp_path, "other").read()
    with pytest.raises(CheckpointError, match="no recovery files"):
        RecoveryLog(tmp_path / "nowhere", "run").read()
