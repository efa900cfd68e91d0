"""A server stops without a goodbye, and another goes on with its files."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ps_clients import save_as_server

from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.parts import load
from elasticcb.checkpoint.remote import Files
from elasticcb.checkpoint.shard_file import Part
from elasticcb.clients.ps_servers import ServerReplacedError
from elasticcb.errors import CheckpointError, ConnectionLostError, ElasticCBError
from elasticcb.master.recovery_files import RecoveryFiles
from elasticcb.optimizers.state import ModelState
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.update_policy import PushName
from elasticcb.rpc import shared_frames
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.partition import ServerPlace, ShardMap, VariableSpec, partition
from elasticcb.sharding.push import Movement
from elasticcb.sharding.table_state import TableSpec, TableState, whole
from helpers_ps import assert_same
from helpers_ps_lost import ON_DISK, SIZES, SPECS, VALUES


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


def test_state_that_the_master_sets_is_set_again_on_a_server_that_is_replaced_before_all_have_it(losing, monkeypatch):
    servers, goes_on = losing(num_ps=2), threading.Event()
    handlers = servers.servers[1]._servicer.handlers
    load = handlers["LoadState"]
    monkeypatch.setitem(handlers, "LoadState", lambda frame: (goes_on.wait(30), load(frame))[1])
    answered, note = threading.Event(), servers.master.recovery.note
    monkeypatch.setattr(servers.master.recovery, "note", lambda *given: (note(*given), answered.set())[0])
    given = [np.full(size, 9.0, np.float32) for size in SIZES]
    with ThreadPoolExecutor(1) as pool:
        setting = pool.submit(servers.master.load_state, [*given, np.zeros((1, 3), np.float32)], None)
        assert answered.wait(30)  # server 0
        servers.replace(0)  # from the initial weights: no file is valid yet
        servers.master.servers.connect(servers.master.servers.known[0], ServerPlace(*servers.find(0)))
        goes_on.set()
        setting.result(timeout=30)
    for value in servers.held()[:3]:
        np.testing.assert_array_equal(value, np.full(value.shape, 9.0))


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
    servers.master.recovery.take_last(0, servers.servers[0].put_down())  # at SIGTERM, after its last answer
    restored = servers.replace()
    assert (restored.version, restored.complete) == (version + 1, True)
    assert not servers.replace().complete  # the new one may have answered more calls


def test_a_server_is_restored_with_what_it_has_saved_although_others_are_still_saving(losing, monkeypatch):
    servers = losing()
    for step in range(2):
        servers.push(step)
        servers.write()
        monkeypatch.setattr(servers.master.recovery, "write", lambda: None)  # is called when all have answered
    assert servers.replace(version=2).version == 2


def test_rows_that_were_pushed_since_the_last_version_are_saved(losing):
    servers = losing()
    servers.push(0)
    servers.write()
    rows = servers.movement(1, (1, 2)).rows
    servers.worker.push(
        Movement.of_rows(rows, {"shared/learning_rate": np.float32(0.1)}, servers.worker.servers.partition)
    )
    servers.write()
    expected = servers.held()
    servers.replace(version=1)
    assert_same(servers.held(), expected)
    files = list(servers.master.recovery.folder.iterdir())
    servers.write()  # nothing has changed
    assert list(servers.master.recovery.folder.iterdir()) == files


def test_server_whose_last_file_is_damaged_lacks_what_it_had_acknowledged(losing):
    servers = losing()
    servers.push(0)
    servers.write()
    servers.push(1)
    saved = servers.servers[0].put_down()
    servers.master.recovery.take_last(0, saved)
    (servers.master.recovery.folder / saved.file).write_bytes(b"")
    restored = servers.replace(version=2)
    assert (restored.version, restored.complete, restored.is_older) == (1, False, True)


def test_server_makes_the_folder_of_its_files_which_may_be_on_its_machine_only(losing, tmp_path):
    losing("on another machine")
    assert (tmp_path / "on another machine" / "recovery").is_dir()


def test_server_does_not_save_for_another_map(losing, tmp_path):
    save = losing().servers[0]._servicer.handlers["Save"]
    with pytest.raises(ElasticCBError, match="another shard map"):
        save(Frame(pb.SaveRequest(path=str(tmp_path / "ps-0"), after="", map_version=1), {}))


def test_nothing_counts_as_saved_if_the_files_of_a_server_do_not_fit_together(losing, monkeypatch):
    servers = losing()
    monkeypatch.setattr(servers.master.recovery, "note", lambda *given: False)
    with pytest.raises(ServerReplacedError, match="server 0 was replaced"):
        servers.write()


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
    (tmp_path / "job" / "recovery" / "manifest.json").write_text("{}")
    restored = servers.replace(version=5)
    assert (restored.source, restored.version) == ("the initial weights", 0)
    np.testing.assert_array_equal(servers.held()[0], VALUES[0])
    assert servers.push(1).version == 6


def test_files_of_variables_of_other_shapes_are_refused(losing):
    servers = losing()
    servers.push(0)
    servers.write()
    servers.master.servers.specs[0] = dataclasses.replace(SPECS[0], shape=(7,))
    files = ModelState(version=1, checkpoint=str(servers.master.recovery.folder))
    manifest = json.dumps(servers.master.recovery.manifest())
    request = servers.master._beginning(servers.master.servers.known[0], files, manifest)
    with pytest.raises(CheckpointError, match=r"belongs to another model: variable 0"):
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

TABLE = VariableSpec("emb/embeddings", (0, 2), "float32", True, table=TableSpec(None, '"zeros"', 7).to_json())
SAVED = (VariableSpec("dense/kernel", (3,), "float32", True), TABLE)
PARTS = partition(SAVED, 1, True)


def part(version, ids):
    rows = np.full((len(ids), 2), version, np.float32)
    return Part(version, {0: np.full(3, version, np.float32)}, tables={1: TableState(np.array(ids), rows)})


def saved(folder, *versions):
    """Files of these versions, each with some ids; the first one has everything."""
    files = RecoveryFiles(folder, "run", SAVED)
    for version, ids in versions:
        save_as_server(files, part(version, ids), PARTS, {1: version})
    return files


def loaded(folder):
    found = load(Files(str(folder)), read_manifest(folder), SAVED, PARTS[0], 0, ShardMap(1))
    table = whole(found.part.tables[1])
    return found, dict(zip(table.ids.tolist(), table.rows[:, 0].tolist(), strict=True))


def test_changes_are_merged_once_they_are_as_large_as_all(tmp_path, monkeypatch):
    monkeypatch.setattr("elasticcb.master.recovery_files._SMALLEST_TOTAL", 0)
    files = saved(tmp_path, (1, [1, 2]), (2, [2]), (3, [1]))
    assert files.request(0, PARTS, 0).after == ""
    save_as_server(files, part(4, [1, 2]), PARTS)
    assert loaded(tmp_path)[1] == {1: 4, 2: 4}


def test_a_damaged_file_ends_what_is_read_and_its_server_saves_everything_next(losing, caplog):
    servers = losing()
    for step in range(3):
        servers.push(step)
        servers.write()
        if step == 1:
            before = servers.held()
    last = sorted(servers.master.recovery.folder.glob("ps-*"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    restored = servers.replace(version=3)
    assert (restored.version, restored.source) == (2, "its recovery files before a damaged one")
    assert "is damaged" in caplog.text
    assert_same(servers.held(), before)
    assert servers.push(3).version == 4
    servers.write()
    servers.push(4)
    expected = servers.held()
    servers.write()
    assert len(list(servers.master.recovery.folder.glob("ps-*"))) == 2  # a whole one, and one of changes
    restored = servers.replace(version=5)
    assert (restored.version, restored.is_older) == (5, False)
    assert_same(servers.held(), expected)


def test_answers_that_do_not_fit_the_files_before_them_are_not_added(tmp_path):
    files = saved(tmp_path, (1, [1]), (2, [2]))
    for after in ("ps-0-00000001", "another"):
        assert not files.note(0, pb.SaveResponse(file="new", after=after, version=3), PARTS)
    assert not files.note(0, pb.SaveResponse(file="new", version=3), [*PARTS, []])  # by other servers
    files.write()
    assert loaded(tmp_path)[0].part.version == 2


def test_files_are_in_use_until_a_manifest_lists_others(tmp_path):
    files, (two, map_version) = saved(tmp_path, (1, [1])), (partition(SAVED, 2, True), 1)
    (before,) = files.request(0, PARTS, 0).keep
    files.request(0, two, map_version)
    assert files.note(0, pb.SaveResponse(file="new", version=2), two)
    files.write()  # nothing: the other server has not saved
    assert files.request(0, two, map_version).keep == ["new", before]
    assert RecoveryFiles(tmp_path, "run", SAVED).request(0, two, map_version).keep == [before]  # of the next master
    assert files.note(1, pb.SaveResponse(file="other", version=2), two)
    files.write()
    assert files.request(0, two, map_version).keep == ["new", "other"]
    files.take_last(2, pb.SaveResponse(file="last", after=before, version=3))  # of a server that is not in use any more


def test_files_of_another_training_are_refused_and_replaced(tmp_path):
    saved(tmp_path, (1, [1]))
    other = RecoveryFiles(tmp_path, "other", SAVED)
    with pytest.raises(CheckpointError, match="another training"):
        other.manifest()
    save_as_server(other, part(2, [2]), PARTS)
    assert loaded(tmp_path)[1] == {2: 2}
    with pytest.raises(CheckpointError, match="saved nothing yet"):
        RecoveryFiles(tmp_path / "nowhere", "run", SAVED).manifest()
