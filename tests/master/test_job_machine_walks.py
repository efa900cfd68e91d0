"""Walks over the whole machine of a job: whatever happens, its journal holds all that another master needs, and the job
comes to its end."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from elasticcb.errors import UsageError
from elasticcb.master.accounting import IllegalTransitionError
from elasticcb.master.evaluation import EvaluationRounds
from elasticcb.master.events import event
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.journal import Journal
from elasticcb.master.master_server import persist
from elasticcb.master.members import Role, ServedCluster
from elasticcb.master.roster import Roster
from elasticcb.master.task import DecisionKind, Lease, MilestoneKind, QueueSettings, TaskResult, TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue
from elasticcb.settings import ClusterSettings, Command, JobSettings
from elasticcb.sharding.partition import ServerPlace

SETTINGS = JobSettings(command=Command.TRAIN, name="job", directory="", cluster=ClusterSettings(num_workers=3))
SOURCES = [("a", 23), ("b", 4)]
VALIDATION = [("v", 9)]
RECORDS = sum(count for _, count in SOURCES)
EPOCHS, LEASE_SECONDS = 3, 100.0
EVENTS = 150


class Walk:
    """A machine, its journal, three workers and two servers, and what the driving thread does at milestones.

    Each metric state is the number of records of its task, so that none may be lost or counted twice.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance, self.path, self.now = random.Random(seed), folder / "journal.log", 0.0
        self.machine = self.new_machine()
        self.machine.queue = TaskQueue(
            QueueSettings(
                records_per_task=4,
                minibatch_size=2,
                num_epochs=EPOCHS,
                shuffle_seed=seed,
                max_retries=1000,
                max_losses=1000,
                lease_seconds=LEASE_SECONDS,
                hold_epochs=self.chance.random() < 0.5,
                repeats_lost=self.chance.random() < 0.5,
            ),
            training=SOURCES,
        )
        self.journal = Journal(self.path)
        self.workers: dict[int, list[Lease]] = {}  # by id: leases that it knows
        self.reported: dict[int, int] = {}  # by lease
        self.last_done: dict[int, Lease] = {}  # by worker
        self.counted: Counter[int] = Counter()  # by epoch: what metric states sum up to
        self.waiting: set[int] = set()  # epochs that wait for their evaluation pass
        self.ended: list[int] = []  # epochs, in order
        self.pids = iter(range(1, 1_000_000))
        self.failovers = 0
        for index in range(3):
            self.join(index)
        servers = [self.register(Role.PS, index) for index in range(2)]
        self.machine.cluster = ServedCluster(servers, [], False)
        self.machine.persist(servers=servers, run="run")
        self.settle()

    def new_machine(self) -> JobMachine:
        return JobMachine(Roster(3, 2, 1000, 1000), number=1, settings=SETTINGS)

    def settle(self) -> None:
        """As `MasterServer` does after each event."""
        persist(self.journal, self.machine, self.machine.take_effects())

    def register(self, role: Role, index: int) -> ServerPlace:
        pid = next(self.pids)
        member = self.machine.register(role, index, f"here:{pid}", pid, "here", self.now, 1)
        return ServerPlace(member.address, member.id)

    def join(self, index: int) -> None:
        self.workers[self.register(Role.WORKER, index).id] = []

    # ---- what workers do

    def step(self) -> None:
        weights = {
            self.take: 6.0,
            self.progress: 4.0,
            self.done: 6.0,
            self.again: 1.0,
            self.failed: 1.0,
            self.split: 1.0,
            self.pass_time: 1.0,
            self.lose_worker: 1.0,
            self.lose_server: 0.5,
            self.save: 2.0,
            self.drive: 4.0,
            self.read_journal: 2.0,
            self.fail_over: 1.0,
        }
        (do,) = self.chance.choices([*weights], [*weights.values()])
        self.now += 1.0
        do()
        self.settle()

    def any_worker(self) -> int:
        return self.chance.choice(list(self.workers))

    def any_lease(self) -> tuple[int, Lease] | None:
        held = [(worker, lease) for worker, leases in self.workers.items() for lease in leases]
        return self.chance.choice(held) if held else None

    def take(self) -> None:
        worker = self.any_worker()
        decision = self.machine.get_task(worker, [lease.id for lease in self.workers[worker]], self.now)
        if decision.lease is not None and self.chance.random() < 0.9:  # else the answer is lost
            self.workers[worker].append(decision.lease)

    def progress(self) -> None:
        found = self.any_lease()
        if found is not None:
            worker, lease = found
            least = self.reported.get(lease.id, 0)
            done = self.chance.randint(least, max(least, lease.task.shard.records))
            version = self.machine.version + self.chance.randint(0, 2)
            assert self.machine.report_progress(worker, lease.id, self.now, done, True, version).accepted
            self.reported[lease.id] = done

    def done(self) -> None:
        found = self.any_lease()
        if found is not None:
            worker, lease = found
            self.workers[worker].remove(lease)
            self.report(worker, lease)
            self.last_done[worker] = lease

    def report(self, worker: int, lease: Lease) -> None:
        task, newest = lease.task, self.machine.newest_server
        states = {} if task.type is TaskType.TRAIN_END else {"count": [float(task.shard.records)]}
        result = TaskResult(self.machine.version + 1, states, servers=newest)
        outcome = self.machine.report_done(worker, lease.id, self.now, result)
        assert outcome.accepted
        if outcome.counts and task.type is TaskType.TRAINING:
            self.counted[task.epoch] += task.shard.records

    def again(self) -> None:
        """The answer to its last report was lost."""
        worker = self.any_worker()
        if worker in self.last_done:
            outcome = self.machine.report_done(worker, self.last_done[worker].id, self.now, TaskResult(0))
            assert outcome.duplicate

    def failed(self) -> None:
        found = self.any_lease()
        if found is not None:
            worker, lease = found
            self.workers[worker].remove(lease)
            self.last_done.pop(worker, None)
            assert self.machine.report_failed(worker, lease.id, self.now, "boom", "", fatal=False).accepted

    def split(self) -> None:
        found = self.any_lease()
        if found is not None and found[1].task.type is TaskType.TRAINING:
            worker, lease = found
            end = min(lease.task.shard.records, -(-self.reported.get(lease.id, 0) // 2) * 2)
            self.machine.split(worker, lease.id, end, self.now)
            self.workers[worker] = [each for each in self.machine.queue.leases(worker) if each in self.workers[worker]]
            self.workers[worker] += [
                each
                for each in self.machine.queue.leases(worker)
                if each.id == lease.id and each not in self.workers[worker]
            ]

    def pass_time(self) -> None:
        self.now += self.chance.choice([1.0, LEASE_SECONDS])
        for lease in self.machine.expire(self.now):
            if lease.worker in self.workers:
                self.workers[lease.worker] = [each for each in self.workers[lease.worker] if each.id != lease.id]

    # ---- what happens to processes

    def lose_worker(self) -> None:
        worker = self.any_worker()
        member = self.machine.roster.member(worker)
        assert member is not None
        if self.chance.random() < 0.5:
            self.machine.roster.lost(worker, "killed")
            self.machine.worker_lost(worker)
        else:
            self.machine.worker_left(member)
            self.machine.roster.asked_to_end(worker, "preempted")
        del self.workers[worker]
        self.settle()
        for role, index in self.machine.roster.to_start():
            self.machine.roster.requested(role, index)
        self.machine.processes_checked()
        self.read_journal()
        self.join(member.index)

    def lose_server(self) -> None:
        member = self.machine.roster.up(Role.PS)[self.chance.randrange(2)]
        self.machine.roster.lost(member.id, "killed")
        self.machine.server_lost(member.index, self.now)
        self.settle()
        place = self.register(Role.PS, member.index)
        self.machine.server_is_back(member.index, place, complete=self.chance.random() < 0.5)

    def save(self) -> None:
        self.machine.servers_have_saved(self.machine.queue.begin_save(), True)

    # ---- what the driving thread does

    def drive(self) -> None:
        """As `JobDriver`: an evaluation pass at the end of each epoch, then its hooks; TRAIN_END after the last."""
        for milestone in self.machine.take_milestones():
            self.settle()
            if self.chance.random() < 0.1:
                self.fail_over()  # the other master finds out again what it has to do
                return
            if milestone.kind is MilestoneKind.EPOCH_DONE:
                self.epoch_done(milestone.number)
            elif milestone.kind is MilestoneKind.ROUND_DONE:
                self.round_done()
            elif milestone.kind is MilestoneKind.TRAINING_DONE:
                self.machine.rounds.training_ended(self.machine.version, evaluates=False)
                self.end_if_all_done()
            elif milestone.kind is MilestoneKind.TRAIN_END_DONE:
                self.machine.finish()

    def epoch_done(self, epoch: int) -> None:
        self.waiting.add(epoch)
        decision = self.machine.rounds.epoch_ended(epoch, self.machine.version)
        if decision.round is not None:
            self.begin_round(decision.round.id)

    def begin_round(self, number: int) -> None:
        self.machine.persist(evaluation_round=number)
        self.settle()
        self.machine.evaluation_begins(number, self.machine.version, VALIDATION)

    def round_done(self) -> None:
        machine, finished = self.machine, self.machine.rounds.running
        assert finished is not None
        assert machine.rounds.collection.merged().states["count"][0] == sum(count for _, count in VALIDATION)
        for epoch in sorted(self.waiting):
            assert finished.epoch is not None
            if epoch <= finished.epoch:
                self.end_epoch(epoch)
        following = machine.rounds.finish(machine.version).round
        machine.persist(evaluated=finished.version)
        if following is not None:
            self.begin_round(following.id)
        self.end_if_all_done()

    def end_epoch(self, epoch: int) -> None:
        machine = self.machine
        assert float(machine.epoch_states.of(epoch).get("count", [0.0])[0]) == self.counted[epoch]
        self.waiting.discard(epoch)
        self.ended.append(epoch)
        machine.epoch_ends(epoch, learning_rate=0.1 / (epoch + 1))
        machine.epoch_begins(learning_rate=0.1 / (epoch + 1))
        machine.release_epoch(epoch + 1)

    def end_if_all_done(self) -> None:
        if self.machine.rounds.all_done and self.machine.queue.training_done and not self.waiting:
            self.machine.add_train_end()

    # ---- what another master finds

    def read_journal(self) -> None:
        self.settle()
        memory = Journal(self.path).memory
        expected = json.loads(json.dumps(self.machine.to_dict()))
        found = {name: getattr(memory, name) for name in expected}
        assert json.loads(json.dumps(found)) == expected
        for epoch in range(EPOCHS):
            after = sum(states["count"][0] for states in memory.states.get(epoch, ()))
            assert float(after) == float(self.machine.epoch_states.of(epoch).get("count", [0.0])[0])

    def fail_over(self) -> None:
        """The master is killed; another one takes over the processes."""
        self.read_journal()
        self.journal.close()
        self.journal = Journal(self.path)
        memory = self.journal.memory
        assert memory.queue is not None
        queue = TaskQueue.from_dict(memory.queue, self.now)
        queue.repeat_milestones(memory.ended_epochs)
        queue.release_epoch(memory.ended_epochs - 1)
        after = self.new_machine()
        after.take_over(memory, queue, self.now)
        after.rounds = EvaluationRounds(first_id=memory.evaluation_round + 1)
        places = [ServerPlace(*place) for place in memory.servers]
        after.cluster = ServedCluster(places, [], False)
        for id in self.workers:
            assert after.has(id)
        self.machine, self.waiting = after, set()
        self.failovers += 1
        assert self.ended == list(range(memory.ended_epochs))
        # The pass that ran starts again: workers find its leases gone.
        for worker, leases in self.workers.items():
            self.workers[worker] = [lease for lease in leases if lease.task.type is not TaskType.EVALUATION]
        evaluated = {worker for worker, lease in self.last_done.items() if lease.task.type is TaskType.EVALUATION}
        self.last_done = {worker: lease for worker, lease in self.last_done.items() if worker not in evaluated}
        assert all(
            after.queue.leases(worker) == leases or {*leases} <= {*after.queue.leases(worker)}
            for worker, leases in self.workers.items()
        )

    # ---- the end

    def finish(self) -> None:
        for _ in range(2000):
            self.step()
            if self.machine.over:
                break
            for worker in list(self.workers):
                if self.machine.get_task(worker, [each.id for each in self.workers[worker]], self.now).lease:
                    self.settle()
                    self.workers[worker] = self.machine.queue.leases(worker)
                for lease in [*self.workers[worker]]:
                    self.workers[worker].remove(lease)
                    self.report(worker, lease)
                    self.last_done[worker] = lease
                    self.settle()
            self.save()
            self.drive()
            self.settle()
        assert self.machine.over
        assert self.ended == list(range(EPOCHS))
        assert self.machine.queue.accounting.records_trained == dict.fromkeys(range(EPOCHS), RECORDS)
        worker = self.any_worker()
        assert self.machine.get_task(worker, (), self.now).kind is DecisionKind.FINISHED


def walk(folder: Path, seed: int) -> Walk:
    taken = Walk(folder, seed)
    for _ in range(EVENTS):
        taken.step()
        if taken.machine.over:
            break
    taken.finish()
    return taken


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 600), marks=pytest.mark.deep)])
def test_another_master_goes_on_with_all_of_the_job_wherever_the_first_was_killed(tmp_path, seeds):
    failovers = 0
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        failovers += walk(folder, seed).failovers  # the folder's name tells the seed
    assert failovers > len(seeds)


def test_an_event_is_persisted_and_wakes_everybody_unless_it_says_otherwise():
    class Machine(JobMachine):
        @event()
        def forgetful(self) -> None:
            self.version += 1

    machine = Machine(Roster(1, 0, 0))
    machine.forgetful()
    effects = machine.take_effects()
    assert effects.changed
    assert effects.wake == 2


def test_an_error_within_an_event_leaves_nothing_unsaid():
    machine = JobMachine(Roster(1, 0, 0), number=1)
    with pytest.raises(UsageError, match="refuses process 7"):
        machine.idle(7, 0.0)
    assert machine.take_effects().changed


def test_the_error_of_a_bug_tells_the_last_events():
    machine = JobMachine(Roster(1, 0, 0), number=1, settings=SETTINGS)
    machine.queue = TaskQueue(QueueSettings(records_per_task=4, minibatch_size=2), training=SOURCES)
    worker = machine.register(Role.WORKER, 0, "", 1, "here", 0.0, 1).id
    lease = machine.get_task(worker, (), 1.0).lease
    machine.queue._doing.find(worker, lease.id).state = TaskState.DONE
    with pytest.raises(IllegalTransitionError, match=r"(?s)task 1 .* is DONE and .*get_task\(1, 1\.0\)\n  report_done"):
        machine.report_done(worker, lease.id, 2.0, TaskResult(1))
