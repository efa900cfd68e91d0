"""Servers stop without a goodbye; what they had acknowledged is at their neighbours."""

from __future__ import annotations

from concurrent.futures import wait

import numpy as np
import pytest
from ps_clients import TrainingControl

from elasticcb.errors import ConnectionLostError, ElasticCBError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps import replica
from elasticcb.ps.replica_log import Entry, Origin, ReplicaLogs
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.partition import block_sizes
from helpers_ps_lost import ON_DISK, ROUNDED, SIZES, SPECS, assert_same


@pytest.fixture
def start(losing):
    return lambda name="job", num_ps=2, **more: losing(name, num_ps=num_ps, **{"ps_replicas": 1, **more})


@pytest.mark.parametrize(
    ("num_ps", "training"),
    [
        (2, {}),
        (3, {}),
        (2, {"embedding": ON_DISK}),
        (2, {"specs": ROUNDED, "embedding": ON_DISK}),
    ],
)
def test_replaced_servers_go_on_as_the_lost_ones_would_have(start, num_ps, training):
    lost, undisturbed = (start(name, num_ps=num_ps, **training) for name in ("lost", "undisturbed"))
    for step in range(9):
        for servers in (lost, undisturbed):
            servers.push(step, ids=(step, step + 1, 11))
            if step == 3:
                servers.master.set_learning_rate(0.05)
        if step == 2:
            lost.write(0)
        if step in (1, 3, 5, 6):
            index = step % num_ps
            lost.lose(index)
            restored = lost.replace(index, version=step + 1)
            assert restored.complete
            assert restored.version == step + 1
            assert restored.source == "its recovery files and its replica"
            lost.write((index - 1) % num_ps)  # whose neighbour is new
    assert_same(lost.held(), undisturbed.held())
    mine, other = lost.exported(), undisturbed.exported()
    assert mine.slots.keys() == other.slots.keys()
    assert mine.shared == other.shared
    for key, slot in mine.slots.items():
        if key[0] != 3:  # rows of the table come in another order
            np.testing.assert_array_equal(slot, other.slots[key])


def test_retry_of_a_push_that_only_the_log_holds_is_not_applied_again(start):
    servers = start()
    servers.push(0)
    before = servers.held()
    servers.lose(1)
    assert servers.replace(1, version=1).complete
    servers.worker._sequence -= 1  # as if an answer had been lost
    servers.push(0)
    assert_same(servers.held(), before)


def pushed(control):
    """What server 0 answers to the first push of a worker, which has not moved."""
    request = pb.ExchangeRequest(worker_id=7, sequence=1, batches=1, known_version=-1, known_state_version=-1, base=-1)
    sizes = block_sizes(SPECS, control.servers.partition[0], True)
    moved = {f"moved/{dtype}": np.zeros(size, dtype) for dtype, size in sizes.items()}
    return control.links[0].call("Exchange", Frame(request, moved)).header.status


def when_applied(servers, version=1):
    """Returns when server 0 has made an update."""
    while True:
        with servers.servers[0]._servicer.holder.lock:
            if servers.model(0).parameters.version == version:
                return


def test_retry_of_a_push_is_answered_when_the_neighbour_has_it(start, pool):
    servers = start()
    retrying = TrainingControl(servers.addresses, SPECS, True)
    with servers.servers[1]._servicer._neighbours._lock:  # the neighbour takes no change
        first = pool.submit(pushed, servers.master)
        when_applied(servers)
        retry = pool.submit(pushed, retrying)
        assert not wait([first, retry], timeout=0.3).done
    assert first.result() == retry.result() == pb.DONE
    assert servers.model(0).parameters.version == 1
    retrying.close()


def test_push_that_the_neighbour_may_lack_is_not_accepted_by_a_server_that_is_closed(start, pool):
    servers = start()
    log = servers.model(0).replica
    with servers.servers[1]._servicer._neighbours._lock:
        push = pool.submit(pushed, servers.master)
        when_applied(servers)
        log.close()
    with pytest.raises(ConnectionLostError, match="Parameter server 0 is closed"):
        push.result()
    assert log._files.is_replicated


def test_log_holds_only_what_the_files_lack(start):
    servers = start()
    logs = servers.servers[1]._servicer._neighbours._logs._logs
    for step in range(3):
        servers.push(step)
    (log,) = logs.values()
    assert [entry.number for entry in log.entries] == [1, 2, 3]
    servers.write(0)
    servers.push(3)
    assert [entry.number for entry in log.entries] == [4]
    servers.lose(0)
    restored = servers.replace(0, version=4)
    assert (restored.version, restored.complete) == (4, True)


def test_files_are_written_when_the_log_is_large(start, monkeypatch):
    servers = start()
    monkeypatch.setattr(replica, "_SMALLEST_LOG", 3_000)  # bytes, of two entries
    monkeypatch.setattr("elasticcb.ps.recovery.RecoveryLog.whole_bytes", 0)
    for step in range(9):
        servers.push(step)
    logs = servers.servers[1]._servicer._neighbours._logs._logs
    (log,) = logs.values()
    assert len(log.entries) < 5
    before = servers.held()
    servers.lose(0)
    assert servers.replace(0, version=9).complete
    assert_same(servers.held(), before)


def test_server_goes_on_without_its_neighbour_and_is_covered_by_the_next_one(start, caplog):
    servers = start(num_ps=3)
    servers.push(0)
    servers.lose(1)
    servers.answer_alone(0)
    assert "Parameter server 0 continues without a replica" in caplog.text
    assert not servers.model(0).replica._files.is_replicated
    assert servers.replace(1, version=1).complete  # server 2 has its log
    servers.write(0)
    assert servers.model(0).replica._files.is_replicated
    servers.push(1)
    before = servers.held()
    servers.lose(0)
    assert servers.replace(0, version=2).complete
    assert_same(servers.held(), before)


def test_server_that_is_lost_while_it_has_no_replica_tells_of_what_is_lost(start):
    servers = start(num_ps=3)
    servers.push(0)
    servers.write(0)
    servers.push(1)
    servers.lose(1)
    servers.answer_alone(0)
    servers.lose(0)
    restored = servers.replace(0, version=2)
    assert (restored.complete, restored.version, restored.source) == (False, 1, "its recovery files")


def test_neighbours_that_are_lost_together_go_on_from_their_files(start):
    servers = start()
    servers.push(0)
    servers.write(0)
    servers.write(1)
    before = servers.held()
    servers.push(1)
    servers.lose(0, 1)
    for index in (0, 1):
        restored = servers.replace(index, version=2)
        assert (restored.complete, restored.version) == (False, 1)
    assert_same(servers.held(), before)
    servers.write(0)
    servers.write(1)
    servers.push(2)
    before = servers.held()
    servers.lose(0)
    assert servers.replace(0, version=3).complete  # covered again
    assert_same(servers.held(), before)


def test_weights_that_the_master_sets_need_no_log(start):
    servers = start()
    servers.push(0)
    given = [np.full(size, 9.0, np.float32) for size in SIZES]
    servers.master.load_state([*given, np.zeros((1, 3), np.float32)], None)
    servers.push(1)
    before = servers.held()
    servers.lose(0)
    assert servers.replace(0, version=3).complete
    assert_same(servers.held(), before)


def test_change_that_can_not_be_made_again_ends_what_is_made_again(start, monkeypatch):
    servers = start()
    servers.push(0)
    holder = servers.servers[0]._servicer.holder
    monkeypatch.setattr(holder, "write_down", lambda replaced=False: None)  # the disk is full
    given = [np.full(size, 9.0, np.float32) for size in SIZES]
    servers.master.load_state([*given, np.zeros((1, 3), np.float32)], None)
    servers.push(1)
    servers.lose(0)
    restored = servers.replace(0, version=3)
    assert (restored.complete, restored.version) == (False, 1)


def test_nothing_is_sent_without_replicas(start):
    assert start(ps_replicas=0).model(0).replica is None


# ------------------------------------------------------------ the log

ORIGIN = Origin("run", 0)


def entries(*numbers, size=0):
    return [Entry(number, "Exchange", b"", {"a": np.zeros(size, np.uint8)}) for number in numbers]


def logs_with(*numbers, written=0):
    logs = ReplicaLogs()
    logs.begin(ORIGIN, 1, 1)
    logs.add(ORIGIN, 1, entries(*numbers), written)
    return logs


def numbers_of(found):
    return None if found is None else [entry.number for entry in found]


def test_log_gives_what_comes_behind_a_number():
    logs = logs_with(4, 5, 6, 7, written=5)
    assert numbers_of(logs.take_over(ORIGIN, 2, 5, 1 << 20)) == [6, 7]
    assert numbers_of(logs.take_over(ORIGIN, 2, 6, 1 << 20)) == [7]
    assert numbers_of(logs.take_over(ORIGIN, 2, 7, 1 << 20)) == []


def test_log_with_a_gap_is_none():
    logs = logs_with(4, 5, 6, written=5)
    assert logs.take_over(ORIGIN, 2, 4, 1 << 20) is None
    assert logs.take_over(Origin("run", 1), 2, 5, 1 << 20) is None
    assert logs.take_over(Origin("other", 0), 2, 5, 1 << 20) is None


def test_log_that_was_begun_and_got_nothing_lacks_nothing():
    logs = logs_with()
    assert numbers_of(logs.take_over(ORIGIN, 2, 17, 1 << 20)) == []


def test_log_that_was_asked_for_late_does_not_replace_a_later_one():
    logs = ReplicaLogs()
    logs.begin(ORIGIN, 1, 2)
    logs.add(ORIGIN, 1, entries(5), 0)
    for late in (1, 2):
        with pytest.raises(ElasticCBError, match="too late"):
            logs.begin(ORIGIN, 1, late)
    assert numbers_of(logs.take_over(ORIGIN, 2, 4, 1 << 20)) == [5]
    with pytest.raises(ElasticCBError, match="too late"):
        logs.begin(ORIGIN, 1, 3)  # by the process that was replaced
    assert numbers_of(logs.take_over(ORIGIN, 2, 4, 1 << 20)) == [5]
    logs.begin(ORIGIN, 2, 1)
    assert numbers_of(logs.take_over(ORIGIN, 3, 4, 1 << 20)) == []


def test_log_comes_in_pages_of_at_least_one_entry():
    logs = ReplicaLogs()
    logs.begin(ORIGIN, 1, 1)
    logs.add(ORIGIN, 1, entries(1, 2, 3, size=10_000), 0)
    assert numbers_of(logs.take_over(ORIGIN, 1, 0, 25_000)) == [1, 2]
    assert numbers_of(logs.take_over(ORIGIN, 1, 2, 1)) == [3]


def test_late_change_of_a_lost_server_is_refused():
    logs = logs_with(1, 2)
    logs.take_over(ORIGIN, 2, 0, 1 << 20)
    with pytest.raises(ElasticCBError, match="without a log here"):
        logs.add(ORIGIN, 1, entries(3), 0)
    logs.add(ORIGIN, 2, entries(3), 0)


def test_changes_come_in_order_without_a_gap():
    logs = logs_with(1, 2)
    for wrong in (2, 4):
        with pytest.raises(ElasticCBError, match=f"Change {wrong} of parameter server 0 came after 2"):
            logs.add(ORIGIN, 1, entries(wrong), 0)
