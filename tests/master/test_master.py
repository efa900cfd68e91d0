"""What the master answers to calls, without any process or driving thread."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from master_state import report_progress, settings_of, state_of

from elasticcb.clients.master import MasterClient
from elasticcb.cluster.external import ExternalCluster
from elasticcb.cluster.inprocess import InProcessCluster
from elasticcb.errors import CallbackWarning, JobFailedError, JobOverError, UsageError
from elasticcb.master.job_machine import OTHERS_FIRST
from elasticcb.master.journal import Journal
from elasticcb.master.master import Master
from elasticcb.master.members import Role, ServedCluster
from elasticcb.master.task import DecisionKind, QueueSettings, TaskResult
from elasticcb.master.task_queue import TaskQueue
from elasticcb.settings import Command, TrainingSettings
from elasticcb.sharding.partition import ServerPlace


@pytest.fixture
def lines():
    return []


def make_master(lines, backend=None):
    settings = settings_of(num_workers=1, num_ps=1)
    master = Master(settings.cluster, backend or ExternalCluster(lines.append), lines.append)
    master.server.begin_job(settings)
    return master


def join(master):
    return master.server.register(Role.WORKER, -1, "", 1, "here").id


def make_queue(lease_seconds=300.0):
    return TaskQueue(
        QueueSettings(records_per_task=10, minibatch_size=1, lease_seconds=lease_seconds), training=[("a", 10)]
    )


def test_a_worker_that_waits_for_a_task_learns_that_the_job_is_over(lines):
    master = make_master(lines)
    worker = join(master)
    kinds = []
    waiting = threading.Thread(target=lambda: kinds.append(master.server.get_task(worker, (), 60.0).kind))
    waiting.start()
    master.server.close()
    waiting.join()
    assert kinds == [DecisionKind.FINISHED]


def test_a_worker_for_which_others_wait_learns_at_once_that_no_task_is_left(lines):
    settings = replace(settings_of(num_workers=2, num_ps=1), training=TrainingSettings(updates="sync"))
    master = Master(settings.cluster, ExternalCluster(lines.append), lines.append)
    master.server.begin_job(settings)
    state_of(master).queue = TaskQueue(QueueSettings(records_per_task=10, minibatch_size=1), training=[("a", 20)])
    first, second = (master.server.register(Role.WORKER, index, "", 1, "here").id for index in range(2))
    assert master.server.get_task(second, (), 0.0).reason == OTHERS_FIRST
    lease = master.server.get_task(first, (), 0.0).lease
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(master.server.get_task, first, (lease.id,), 60.0)  # the other one comes first
        assert master.server.get_task(second, (), 0.0).kind is DecisionKind.TASK
        decision = waiting.result(timeout=30)
    assert decision.kind is DecisionKind.WAIT
    assert decision.reason != OTHERS_FIRST


def test_a_worker_that_waits_for_the_servers_learns_that_the_job_is_over(lines):
    master = make_master(lines)
    worker = join(master)
    master.server.close()
    with pytest.raises(JobFailedError, match="ended before it started"):
        master.server.wait_for_cluster(worker, 60.0)


def test_an_error_of_a_worker_while_the_job_ends_is_no_loss(lines):
    master = make_master(lines)
    worker = join(master)
    master.server.close()
    master.server.leave(worker, "the server is gone", "", fatal=False)
    assert state_of(master).roster.up(Role.WORKER) == []
    assert state_of(master).roster.losses.lost[Role.WORKER] == 0
    assert lines == []
    assert state_of(master).error is None


def test_totals_of_an_earlier_master_are_counted_on(lines, tmp_path):
    for number in (1, 2, 3):
        master, journal = make_master(lines), Journal(tmp_path / "journal.log")
        state, memory = state_of(master), journal.memory
        state.queue = make_queue()
        master.server.keep(journal)
        if memory.queue is not None:
            state.roster.next_id = memory.next_id
            state.totals.updates_lost = 2  # servers that began with files of others
            state.resume(memory)
        worker = join(master)
        lease = master.server.get_task(worker, (), 0.0).lease
        master.server.report_done(worker, lease.id, TaskResult(5, batches_skipped=1))
        master.server.warn(CallbackWarning("subject", "text", 3))
        state.totals.recovered(4.0 - number, 7)
        master.server.lost(worker, "killed")
        assert (state.totals.batches_skipped, state.totals.callback_errors) == (number, 3 * number)
        assert state.roster.losses.lost[Role.WORKER] == number
        assert (state.totals.longest_recovery, state.totals.updates_lost) == (3.0, 9 * number - 2)
        journal.close()


def test_autoscaling_ends_when_the_number_of_workers_is_set_by_hand(lines, tmp_path):
    master = make_master(lines)
    master.server.keep(Journal(tmp_path / "journal.log"))
    state_of(master).queue, state_of(master).autoscales = make_queue(), True
    assert master.server.scale(3) == 1
    assert not state_of(master).autoscales
    assert "Autoscale: off" in lines[-1]
    memory = Journal(tmp_path / "journal.log").memory
    assert (memory.workers, memory.autoscale) == (3, False)


def test_a_wish_for_servers_knows_what_it_waits_for(lines):
    master = make_master(lines)
    state_of(master).queue = make_queue()
    master.server.register(Role.PS, 0, "here:1", 2, "here")
    scaling = master.server_scaling
    wish = scaling.ask(2, waiting=False, seconds=0.0)
    scaling.turn(None, "the evaluation pass to end", lambda servers: "")
    assert scaling.ask(2, waiting=True, seconds=0.0).waits_for == "the evaluation pass to end"
    scaling.turn(None, "", lambda servers: "")
    assert wish.waits_for == "all parameter servers to be up"
    scaling.turn(None, "", lambda servers: f"no {servers}")
    assert (wish.done, wish.error, lines[-1]) == (True, "no 2", "no 2")


def test_a_server_that_is_asked_to_end_after_the_last_task_is_replaced_and_a_worker_is_not(lines):
    master = make_master(lines)
    worker, server = join(master), master.server.register(Role.PS, 0, "here:1", 2, "here").id
    state_of(master).over = True
    master.server.leave(server, "it was asked to end", "", fatal=False, asked=True)
    master.server.leave(worker, "it was asked to end", "", fatal=False, asked=True)
    assert state_of(master).error is None
    assert state_of(master).roster.to_start() == [(Role.PS, 0)]


def test_workers_that_run_functions_are_not_scaled(lines):
    master = make_master(lines)
    state_of(master).queue = make_queue()
    state_of(master).settings = replace(state_of(master).settings, command=Command.CALL)
    with pytest.raises(UsageError, match=r"workers of Cluster\.schedule"):
        master.server.scale(2)
    assert state_of(master).roster.size(Role.WORKER) == 1


def test_a_worker_that_leaves_with_an_error_gives_its_task_back(lines):
    master = make_master(lines)
    state_of(master).queue = make_queue()
    worker = join(master)
    master.server.get_task(worker, (), 0.0)
    master.server.leave(worker, "interrupted where it runs", "", fatal=False)
    assert state_of(master).queue.leases() == []
    assert "interrupted where it runs; restart 1 of" in lines[0]


def test_a_thread_keeps_its_task_however_long_it_stands_at_a_breakpoint(lines):
    master = make_master(lines, InProcessCluster(lambda *_: None))
    state_of(master).queue = make_queue(lease_seconds=1e-9)
    master.server.get_task(join(master), (), 0.0)
    master.server.tend()
    assert len(state_of(master).queue.leases()) == 1


def test_a_worker_keeps_its_task_while_a_server_is_lost(lines):
    master = make_master(lines)
    server = master.server.register(Role.PS, 0, "here:1", 2, "here").id
    worker, state = join(master), state_of(master)
    state.queue = make_queue(lease_seconds=1e-9)
    state.cluster = ServedCluster([ServerPlace("here:1", server)], [], False)
    master.server.get_task(worker, (), 0.0)
    master.server.lost(server, "killed")
    master.server.tend()
    assert len(state.queue.leases()) == 1
    later = master.server.register(Role.PS, 0, "here:2", 3, "here").id
    master.server.tend()
    assert len(state.queue.leases()) == 1  # the model is not with it yet
    state.server_is_back(0, ServerPlace("here:2", later), complete=False)
    master.server.tend()
    assert state.queue.leases() == []


def hold_long_batch(master):
    """A worker reports that it has been in its first batch for longer than its lease."""
    state_of(master).queue = make_queue(lease_seconds=1.0)
    worker = join(master)
    lease = master.server.get_task(worker, (), 0.0).lease
    report_progress(master, worker, lease.id, 0, computing=2.0)


def test_a_long_batch_is_told_with_the_number_by_which_its_worker_has_a_log(lines):
    master = make_master(lines)
    master.server.register(Role.PS, -1, "here:1", 1, "here")  # so that the worker's id is another number than its place
    hold_long_batch(master)
    assert any(line.startswith("Worker 0 has computed one batch for 2 s. After 12 s") for line in lines)


def test_a_thread_in_a_long_batch_is_not_called_hung(lines):
    hold_long_batch(make_master(lines, InProcessCluster(lambda *_: None)))
    assert lines == []


def test_a_process_of_a_job_that_is_over_is_sent_to_the_next_one(lines):
    master = make_master(lines)
    worker = join(master)
    master.server.begin_job(state_of(master).settings)
    state_of(master).queue = make_queue()
    for call in (
        lambda: master.server.program_of(1),
        lambda: master.server.wait_for_cluster(worker, 60.0),
        lambda: join(master),
    ):
        with pytest.raises(JobOverError, match="Job 1 is over; the current job is 2"):
            call()
    assert master.server.get_task(worker, (), 60.0).kind is DecisionKind.FINISHED
    assert master.server.register(Role.WORKER, -1, "", 1, "here", job=2).id == worker
    assert master.server.get_task(worker, (), 60.0).kind is DecisionKind.TASK


def test_what_fails_before_a_process_has_joined_a_job_that_is_over_ends_no_other_job(lines):
    master = make_master(lines)
    master.start()
    client = MasterClient(master.address, patience_seconds=5.0)
    next(client.jobs())
    try:
        with pytest.raises(FileNotFoundError), client.joining():
            raise FileNotFoundError
        state_of(master).over = True
        with pytest.raises(JobOverError), client.joining():
            raise FileNotFoundError
        master.server.begin_job(state_of(master).settings)
        with pytest.raises(JobOverError), client.joining():
            raise FileNotFoundError
    finally:
        client.close()
        master.stop()


def test_the_result_of_a_function_is_kept_once(lines):
    master = make_master(lines)
    state_of(master).queue = TaskQueue(QueueSettings(records_per_task=1, minibatch_size=1))
    worker = join(master)
    state_of(master).calls[7] = b"call"
    state_of(master).queue.add_function(7)
    lease = master.server.get_task(worker, (), 0.0).lease
    for result in (b"first", b"again"):
        assert master.server.report_done(worker, lease.id, TaskResult(0, function_result=result)).accepted
    assert (state_of(master).results, state_of(master).calls) == ({7: b"first"}, {})


def test_the_version_never_goes_back(lines):
    master = make_master(lines)
    master.server.reached_version(7)
    master.server.reached_version(5)
    assert state_of(master).version == 7


def test_a_server_that_waits_learns_of_a_lost_worker_at_once(lines):
    master = make_master(lines)
    worker, server = join(master), master.server.register(Role.PS, 0, "here:1", 2, "here").id
    assert master.server.next_job(1, server, 0.0) == (0, None)
    waiting = threading.Thread(target=master.server.next_job, args=(1, server, 600.0))
    waiting.start()
    master.server.leave(worker, "it is gone", "", fatal=False)
    waiting.join(60.0)
    assert not waiting.is_alive()
    assert state_of(master).roster.lost_workers == [worker]
    assert master.server.next_job(1, server, 0.0, known_lost=1) == (0, None)
