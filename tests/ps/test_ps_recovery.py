"""A server stops without a goodbye, and another goes on with its files."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elasticcb.checkpoint.shard_file import Part
from elasticcb.clients.ps_servers import ServerReplacedError
from elasticcb.errors import CheckpointError, ConnectionLostError
from elasticcb.master.initial_model import InitialModel
from elasticcb.ps.recovery import RecoveryLog, Saved
from elasticcb.ps.update_policy import PushName
from elasticcb.rpc import shared_frames
from elasticcb.sharding.table_source import whole
from elasticcb.sharding.table_state import TableState
from elasticcb.storage import durable
from helpers_ps_lost import ON_DISK, SIZES, SPECS, VALUES, assert_same


@pytest.mark.parametrize(
    "training", [{}, {"updates": "sync"}, {"embedding": ON_DISK}], ids=["at once", "rounds", "rows on disk"]
)
def test_replaced_server_goes_on_as_the_lost_one_would_have(losing, training):
    lost, undisturbed = losing("lost", **training), losing("undisturbed", **training)
    for step, ids in enumerate([(0, 1), (1, 2), (3,), (0, 4)]):
        for servers in (lost, undisturbed):
            servers.push(step, ids)
        if step in (0, 1, 2):
            lost.write()  # all, then what changed, twice
        if step == 2:
            assert lost.replace(version=3).version == 3
    assert lost.worker.version == undisturbed.worker.version == 4
    assert_same(lost.held(), undisturbed.held())


def test_what_was_not_written_is_lost_and_versions_go_on(losing):
    servers = losing()
    servers.push(0)
    servers.write()
    before = servers.held()
    servers.push(1)
    servers.push(2, (5,))
    assert servers.replace(version=3).version == 1
    held = servers.held()
    assert_same(held, before)
    assert servers.push(3).version == 4


def test_retry_of_a_push_that_the_files_contain_is_not_applied_again(losing):
    servers = losing()
    servers.push(0)
    servers.write()
    before = servers.held()
    servers.replace(version=1)
    servers.worker._sequence -= 1  # as if the answer had been lost
    servers.push(0)
    assert_same(servers.held(), before)
    servers.push(1)
    assert not np.array_equal(servers.held()[0], before[0])


def test_learning_rate_and_snapshot_that_the_master_has_set_are_set_again(losing):
    servers = losing()
    servers.push(0)
    servers.write()
    servers.replace(version=1, learning_rate=0.01, evaluation_round=3)
    servers.push(1)
    assert servers.worker.learning_rate == pytest.approx(0.01)
    servers.worker.pull()
    kept, present = servers.worker.pull_snapshot(3)[0], servers.worker.blocks[0]
    assert not np.array_equal(kept["weights/float32"], present["weights/float32"])


def test_state_that_the_master_sets_is_written_at_once(losing):
    servers = losing()
    servers.push(0)
    given = [np.full(size, 9.0, np.float32) for size in SIZES]
    servers.master.load_state([*given, np.zeros((1, 3), np.float32)], None)
    servers.replace()
    np.testing.assert_array_equal(servers.held()[0], np.full(6, 9.0))


def test_rounds_of_a_restored_server_wait_for_all_that_train(losing):
    """Else a worker's movements would be merged alone there, and each server would wait for the other's workers."""
    servers = losing(updates="sync")
    servers.master.members = lambda: (1, 2)
    servers.replace()
    policy = servers.model(0).policy
    policy.come(PushName(1, 1))
    assert policy.due(()) == []
    policy.come(PushName(2, 1))
    assert policy.due(()) == [PushName(1, 1), PushName(2, 1)]


def test_files_contain_all_that_was_answered_before(losing):
    servers = losing()
    version = servers.push(0).version
    servers.master.persist()
    restored = servers.replace(version=version)
    assert (restored.version, restored.complete) == (version, False)
    servers.push(1)
    servers.master.persist()  # by the new server
    servers.servers[0].put_down()  # at SIGTERM, after its last answer
    restored = servers.replace()
    assert (restored.version, restored.complete) == (version + 1, True)
    assert not servers.replace().complete  # the new one may have answered more calls


@pytest.mark.parametrize("shares_memory", [True, False])
def test_call_to_a_server_that_hangs_ends_when_it_is_lost_and_is_answered_by_the_next(
    losing, monkeypatch, shares_memory
):
    monkeypatch.setattr(shared_frames, "is_supported", lambda: shares_memory)
    servers = losing()
    servers.push(0)
    servers.write()
    before = servers.held()
    hung, asked, goes_on = servers.servers[0], threading.Event(), threading.Event()
    hung._servicer.handlers["Exchange"] = lambda frame: (asked.set(), goes_on.wait())
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(servers.worker.pull)
        assert asked.wait(30)
        servers.lost.add(0)
        servers.replace(version=1)
        servers.worker.servers.end_calls(0)
        try:
            pulled.result(timeout=30)
        finally:
            goes_on.set()
    assert_same(servers.held(), before)
    hung.stop(0)


def test_server_without_files_begins_anew(losing, tmp_path):
    servers = losing()
    servers.push(0)
    servers.write()
    (tmp_path / "job" / "recovery" / "ps-0" / "log.json").write_text("{}")
    restored = servers.replace(version=5)
    assert (restored.source, restored.version) == ("the initial weights", 0)
    np.testing.assert_array_equal(servers.held()[0], VALUES[0])
    assert servers.push(1).version == 6


def test_files_of_variables_of_other_shapes_are_refused(losing):
    servers = losing()
    servers.push(0)
    servers.write()
    servers.master.servers.specs[0] = dataclasses.replace(SPECS[0], shape=(7,))
    request = servers.master._beginning(servers.master.servers.known[0], InitialModel(version=1), True)
    with pytest.raises(CheckpointError, match=r"lack variables \[0\]: they belong to another model"):
        servers.servers[0]._servicer.handlers["Initialize"](request)
    assert servers.push(1).version == 2  # the server goes on with what it holds


def test_table_that_is_read_while_its_server_is_replaced_is_read_again(losing):
    servers = losing()
    servers.push(0, tuple(range(6)))
    servers.write()
    expected = servers.worker.weights()
    pieces = servers.worker.read_table(3, rows=2)
    next(pieces)
    servers.replace(version=1)
    with pytest.raises(ServerReplacedError, match=r"emb/embeddings.*Read it again"):
        list(pieces)
    assert_same(servers.worker.weights()[0], expected[0])


def test_client_that_nobody_tells_of_another_server_gives_up(losing):
    servers = losing()
    servers.worker.servers._patience = 0.2
    servers.lose(0)
    with pytest.raises(ConnectionLostError, match="parameter server 0"):
        servers.worker.pull()


# ------------------------------------------------------------ the files


def saved(version, ids, worker=1):
    rows = np.full((len(ids), 2), version, np.float32)
    weights = {0: np.full(3, version, np.float32)}
    return Saved(Part(version, weights, tables={1: TableState(np.array(ids), rows)}), {worker: version})


def test_files_hold_the_last_of_each_row(tmp_path):
    log = RecoveryLog(tmp_path / "ps-0", "run")
    for version, ids in ((1, [4, 0, 9]), (2, [0]), (3, [9, 7])):
        log.write(saved(version, ids), whole=version == 1)
    found = RecoveryLog(tmp_path / "ps-0", "run").read()
    assert found.answered == {1: 3}
    table = whole(found.part.tables[1])
    assert dict(zip(table.ids.tolist(), table.rows[:, 0].tolist(), strict=True)) == {0: 2, 4: 1, 7: 3, 9: 3}
    np.testing.assert_array_equal(found.part.weights[0], [3, 3, 3])


def test_whole_file_replaces_those_before_it(tmp_path):
    log = RecoveryLog(tmp_path, "run")
    for version in (1, 2, 3):
        log.write(saved(version, [version]), whole=version != 2)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert whole(RecoveryLog(tmp_path, "run").read().part.tables[1]).ids.tolist() == [3]


def test_damaged_file_ends_what_is_read_and_one_can_go_on_from_there(tmp_path, caplog):
    log = RecoveryLog(tmp_path, "run")
    for version in (1, 2, 3):
        log.write(saved(version, [version]), whole=version == 1)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    log = RecoveryLog(tmp_path, "run")
    found = log.take_over()
    assert (found.part.version, found.answered) == (2, {1: 2})
    assert "is damaged" in caplog.text
    log.write(saved(4, [4]), whole=False)
    assert whole(RecoveryLog(tmp_path, "run").read().part.tables[1]).ids.tolist() == [1, 2, 4]


def test_what_can_only_be_read_is_restored_and_written_later(tmp_path, monkeypatch):
    RecoveryLog(tmp_path, "run").write(saved(1, [1]), whole=True)
    log = RecoveryLog(tmp_path, "run")

    def fail(*_):
        raise OSError("The disk is full.")

    with monkeypatch.context() as full:
        full.setattr(durable, "write_document", fail)
        assert log.take_over().part.version == 1
        with pytest.raises(CheckpointError, match="The disk is full"):
            log.write(saved(2, [2]), whole=False)
    log.write(saved(3, [3]), whole=False)
    assert RecoveryLog(tmp_path, "run").read().part.version == 3


def test_files_of_another_training_are_refused(tmp_path):
    log = RecoveryLog(tmp_path, "run")
    log.write(saved(1, [1]), whole=True)
    with pytest.raises(CheckpointError, match="another training"):
        RecoveryLog(tmp_path, "other").read()
    with pytest.raises(CheckpointError, match="No readable recovery files"):
        RecoveryLog(tmp_path / "nowhere", "run").read()
