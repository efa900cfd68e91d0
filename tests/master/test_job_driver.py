"""The course of a job, turn by turn; workers, servers and Keras are stood in for: no process, no thread, no Keras."""

import threading
from types import SimpleNamespace

import pytest

from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import JobFailedError
from elasticcb.master.evaluation import EpochStates, EvaluationRounds
from elasticcb.master.events import Wake
from elasticcb.master.job_driver import JobDriver
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.journal import Journal, Memory
from elasticcb.master.master import Master
from elasticcb.master.members import Role
from elasticcb.master.report import Report
from elasticcb.master.roster import Roster
from elasticcb.master.startup import begin_job
from elasticcb.master.task import DecisionKind, QueueSettings, TaskResult, TaskType
from elasticcb.master.task_queue import TaskQueue
from elasticcb.settings import ClusterSettings, Command, JobSettings

SETTINGS = JobSettings(
    command=Command.TRAIN, name="job", directory="", cluster=ClusterSettings(num_workers=1, num_ps=1)
)


class Told:
    """Stands for hooks, servers, epochs and the display: keeps what is called, in order."""

    def __init__(self, calls, **answers):
        self._calls, self._answers = calls, answers
        self.last_logs = {}

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if name not in ("batches", "update", "message", "evaluated", "epoch_ended"):
                self._calls.append(" ".join([name, *(str(each) for each in args if not isinstance(each, dict))]))
            return self._answers.get(name)

        return call


class Training:
    """A course of two epochs of two tasks each, with a round at the end of each epoch, and its one worker."""

    def __init__(self):
        self.calls = []
        self.master = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
        server = self.master.server
        server.begin_job(SETTINGS)
        queue = TaskQueue(
            QueueSettings(records_per_task=10, minibatch_size=5, num_epochs=2, shuffle_seed=None, hold_epochs=True),
            training=[("a", 20)],
        )
        order = SimpleNamespace(
            settings=SETTINGS,
            server=server,
            master=self.master,
            memory=Memory(),
            resumes=False,
            evaluates_as_keras=False,
            report=Report(self.master, SETTINGS, Told(self.calls)),
        )
        host = SimpleNamespace(
            callbacks=SimpleNamespace(wants=lambda hook: False, stop_requested=False),
            sources={"training": [("a", 20)], "evaluation": [("b", 10)]},
            training_logs=lambda states: {"loss": float(states["loss"][0])},
            metrics=SimpleNamespace(in_order=dict),
            round_logs=lambda merged, version: {"loss": float(merged.states["loss"][0])},
            exports=False,
            finalizes=False,
        )
        served = SimpleNamespace(
            host=host,
            hooks=Told(self.calls, begin_round=7),
            ps=Told(self.calls, finish_training=9),
            servers=SimpleNamespace(restore_lost=lambda: self.calls.append("restore_lost"), resize=None),
            origin=SimpleNamespace(checkpoint=""),
        )
        checkpoints = SimpleNamespace(is_due=lambda version: False, wanted=False)
        epochs = EpochsOf(self.calls, server)
        with server.state() as state:
            state.queue, state.rounds = queue, EvaluationRounds()
        self.queue = queue
        self.course = JobDriver(order, served, queue, epochs, checkpoints, lambda: None, ())
        self.worker = self.master.server.register(Role.WORKER, 0, "", 1, "here").id

    def do(self, expected, version=7):
        """The worker gets a task of that type, and does it."""
        decision = self.master.server.get_task(self.worker, (), 0.0)
        assert decision.kind is DecisionKind.TASK, decision.reason
        task = decision.lease.task
        assert task.type is expected
        states = {} if expected is TaskType.TRAIN_END else {"loss": [2.0]}
        assert self.master.server.report_done(self.worker, decision.lease.id, TaskResult(version, states)).accepted


class EpochsOf(Told):
    """Stands for the hooks of epochs; the queue is let go on after each, as by the real one."""

    def __init__(self, calls, server):
        super().__init__(calls)
        self._master = server

    def end(self, epoch, logs):
        self._calls.append(f"end {epoch} {logs}")
        with self._master.state() as state:
            state.queue.release_epoch(epoch)


def test_a_training_job_takes_its_course_to_the_last_hook():
    training = Training()
    training.course.begin(0)
    logs = "{'loss': 4.0, 'val_loss': 2.0}"
    for epoch in (0, 1):
        for _ in range(2):
            training.do(TaskType.TRAINING)
        training.course.turn()  # the epoch is done: a round begins
        training.do(TaskType.EVALUATION)
        training.course.turn()  # the round is done: the epoch ends
        assert f"end {epoch} {logs}" in training.calls
    # The last update came with the end of training, after the round of the last epoch had begun.
    training.do(TaskType.EVALUATION, version=9)
    training.course.turn()
    training.do(TaskType.TRAIN_END, version=9)
    assert not training.course.over
    training.course.turn()
    assert training.course.over
    assert [call for call in training.calls if call.startswith(("end ", "call"))] == [
        f"end 0 {logs}",
        f"end 1 {logs}",
        "call on_train_end",
        "call on_train_end",
    ]
    assert training.calls.count("begin_round 1") == 1
    assert training.master.server.get_task(training.worker, (), 0.0).kind is DecisionKind.FINISHED


def test_a_lost_server_is_given_its_model_in_the_next_turn():
    training = Training()
    training.course.begin(0)
    server = training.master.server.register(Role.PS, 0, "here:1", 2, "here").id
    training.master.server.lost(server, "killed")
    training.course.turn()
    assert training.calls.count("restore_lost") == 1


def test_an_error_found_in_a_call_ends_the_course():
    training = Training()
    training.course.begin(0)
    training.master.server.leave(training.worker, "its data is torn", "", fatal=True)
    with pytest.raises(JobFailedError, match="its data is torn"):
        training.course.turn()


# ---------------------------------------------------------------- what another master goes on with


def new_machine():
    return JobMachine(Roster(1, 0, 5, 5), number=1, settings=SETTINGS)


def new_queue():
    return TaskQueue(QueueSettings(records_per_task=10, minibatch_size=5, shuffle_seed=None), training=[("a", 30)])


def working_state():
    """A state with a journal, and a worker that has done one task and half of the next."""
    state = new_machine()
    state.queue = new_queue()
    worker = state.register(Role.WORKER, 0, "", 1, "here", 0.0, 1).id
    first = state.get_task(worker, (), 0.0).lease
    state.report_done(worker, first.id, 1.0, TaskResult(2, {"loss": [3.0]}))
    second = state.get_task(worker, (), 2.0).lease
    state.report_progress(worker, second.id, 3.0, 5)
    return state, worker, second


def memory_of(state, folder):
    journal = Journal(folder / "journal.log")
    effects = state.take_effects()
    assert effects.changed
    journal.add(state.to_dict(), states=effects.states, restarted=effects.restarted)
    journal.close()
    return Journal(folder / "journal.log").memory


def test_a_job_is_resumed_behind_the_records_that_were_reported(tmp_path):
    state, _, _ = working_state()
    memory = memory_of(state, tmp_path)
    after = new_machine()
    after.queue = TaskQueue.from_dict(memory.queue)
    after.resume(memory)
    assert after.version == 2
    assert float(after.epoch_states.of(0)["loss"][0]) == 3.0
    worker = after.roster.register(Role.WORKER, 0, "", 2, "here", 0.0).id
    assert after.get_task(worker, (), 0.0).lease.task.shard.start == 15


def test_a_job_that_is_resumed_shows_where_it_was_until_it_goes_on(tmp_path):
    state, _, _ = working_state()
    master = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
    begin_job(SimpleNamespace(settings=SETTINGS, server=master.server, memory=memory_of(state, tmp_path), started=0.0))
    seen = master.observe()
    assert (seen.version, seen.records_trained, seen.epoch) == (2, 15, 1)


def test_a_worker_goes_on_with_its_lease_when_another_master_has_taken_over(tmp_path):
    state, worker, lease = working_state()
    memory = memory_of(state, tmp_path)
    after = new_machine()
    after.take_over(memory, TaskQueue.from_dict(memory.queue, 10.0), 10.0)
    outcome = after.report_done(worker, lease.id, 11.0, TaskResult(4, {"loss": [1.0]}))
    assert outcome.accepted
    assert float(after.epoch_states.of(0)["loss"][0]) == 4.0
    assert sum(after.queue.accounting.records_trained.values()) == 20


def test_states_of_an_epoch_that_starts_again_replace_earlier_ones_also_after_another_master(tmp_path):
    state, worker, lease = working_state()
    state.report_done(worker, lease.id, 4.0, TaskResult(4, {"loss": [1.0]}, restarts=True))
    assert float(state.epoch_states.of(0)["loss"][0]) == 1.0
    third = state.get_task(worker, (), 5.0).lease
    state.report_done(worker, third.id, 6.0, TaskResult(6, {"loss": [0.5]}))
    memory = memory_of(state, tmp_path)
    journal = Journal(tmp_path / "journal.log")
    journal.begin()  # compacted
    journal.close()
    for known in (memory, Journal(tmp_path / "journal.log").memory):
        after = new_machine()
        after.resume(known)
        assert float(after.epoch_states.of(0)["loss"][0]) == 1.5


def test_states_that_are_replaced_while_they_are_merged_are_gone():
    states = EpochStates()
    states.merging = frozenset({"maxima"})
    for task in range(20):
        states.add(0, {"maxima": [task]})
    ((epoch, name, pile),) = states.piles()
    states.forget(0)
    states.merged(epoch, name, pile, [19])
    states.add(0, {"maxima": [3]})
    states.merged(epoch, name, pile, [19])
    assert states.of(0) == {"maxima": [[3]]}


def test_states_that_can_not_be_summed_are_merged_in_piles():
    states = EpochStates()
    states.merging = frozenset({"maxima"})
    for task in range(20):
        states.add(0, {"maxima": [task], "loss": [1.0]})
        for epoch, name, pile in states.piles():
            states.add(0, {"maxima": [-task]})  # reported meanwhile
            states.merged(epoch, name, pile, [max(value for (value,) in pile)])
    assert max(value for (value,) in states.of(0)["maxima"]) == 19
    assert len(states.to_journal()) < 10
    assert float(states.of(0)["loss"][0]) == 20.0


def test_a_report_that_nothing_can_be_handed_out_for_wakes_the_driver_alone():
    state, worker, lease = working_state()
    assert state.get_task(worker, (lease.id,), 3.5).lease is not None
    state.take_effects()
    state.report_done(worker, lease.id, 4.0, TaskResult(3))
    effects = state.take_effects()
    assert (effects.changed, effects.wake) == (True, Wake.DRIVER)


def test_who_waits_sees_the_state_of_the_next_job():
    server = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None).server
    seen = []

    def wait():
        with server.state():
            seen.append(server.wait_for(lambda state: state.number == 1, 60.0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    server.begin_job(SETTINGS)
    waiting.join()
    with server.state() as state:
        assert seen == [state]
