"""Whatever workers do, no record is lost, none is counted twice, and the job comes to its end."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from elasticcb.errors import WireError
from elasticcb.master.shards import Shard
from elasticcb.master.task import (
    HANDING_OUT_ORDER,
    DecisionKind,
    Lease,
    MilestoneKind,
    QueueSettings,
    TaskState,
    TaskType,
)
from elasticcb.master.task_queue import TaskQueue

LEASE_SECONDS = 100.0
WORKERS = st.integers(0, 3)
PICK = st.integers(0, 30)
SOURCES = st.lists(st.integers(0, 37), min_size=1, max_size=3).map(
    lambda counts: [(f"s{place}", count) for place, count in enumerate(counts)]
)


class TaskQueueMachine(RuleBasedStateMachine):
    """Four places for workers that take tasks, report, hang, die and lose answers in any order.

    `credited` holds, as seen from outside, every record by (type, epoch or round, source, index) that an accepted
    report covers for the first time in its lease; none may come twice, and at the end none may be missing.
    """

    @initialize(
        training=SOURCES,
        prediction=SOURCES,
        batch=st.integers(1, 4),
        batches_per_task=st.integers(1, 4),
        epochs=st.integers(1, 3),
        max_batches=st.one_of(st.just(0), st.integers(1, 30)),
        hold=st.booleans(),
        limit=st.sampled_from([1, 1000]),
        seed=st.integers(0, 5),
        repeats=st.booleans(),
    )
    def start(self, training, prediction, batch, batches_per_task, epochs, max_batches, hold, limit, seed, repeats):
        self.training, self.prediction, self.epochs = training, prediction, epochs
        self.batch, self.max_batches, self.hold = batch, max_batches, hold
        self.queue = TaskQueue(
            QueueSettings(
                records_per_task=batch * batches_per_task,
                minibatch_size=batch,
                num_epochs=epochs,
                max_batches=max_batches,
                shuffle_seed=seed,
                max_retries=limit,
                max_losses=limit,
                lease_seconds=LEASE_SECONDS,
                hold_epochs=hold,
                repeats_lost=repeats,
            ),
            training=training,
            prediction=prediction,
        )
        self.now = 0.0
        self.ids = {place: place for place in range(4)}  # place -> id of the worker there
        self.next_worker = 4
        self.held: dict[int, list[Lease]] = {place: [] for place in range(4)}
        self.progress: dict[int, int] = {}  # lease -> records reported
        self.done: list[tuple[int, Lease]] = []  # (worker, lease)
        self.dead: list[tuple[int, Lease]] = []
        self.last_report: dict[int, int] = {}  # worker -> lease
        self.credited: set = set()
        self.repeats = repeats
        self.unsaved: set = set()  # training records that a server would lose
        self.saving: tuple | None = None  # the mark, and what was unsaved then
        self.late: dict[int, set] = {}  # what came on leases that are older than the last loss of a server
        self.trained: Counter = Counter()  # records, by epoch
        self.handed_out: set = set()  # training records that were ever handed out
        self.batches: dict[int, int] = {}  # task -> batches when first handed out
        self.rounds: dict[int, list] = {}
        self.milestones: list = []
        self.stopped = False
        self.split_off: set = set()  # (epoch, source, end) of both parts, which were counted with their first task

    # ---- what happens

    @rule(place=WORKERS)
    def take_and_do(self, place):
        """Keeps the job going, so that the other rules meet it in all its stages."""
        if self.take_one(place) is DecisionKind.TASK:
            self.report_done(len(self.live()) - 1 - sum(len(self.held[p]) for p in self.held if p > place))

    @rule(place=WORKERS, answer_lost=st.sampled_from([False, False, True]))
    def take(self, place, answer_lost):
        kind = self.take_one(place, answer_lost)
        if self.queue.failure is not None:
            assert kind is DecisionKind.FINISHED

    def take_one(self, place, answer_lost=False):
        decision = self.queue.get_task(self.ids[place], self.now, [lease.id for lease in self.held[place]])
        assert decision.reason
        if decision.lease is None:
            assert decision.kind is not DecisionKind.TASK
            return decision.kind
        lease = decision.lease
        task = lease.task
        assert lease.worker == self.ids[place]
        assert task.type is TaskType.TRAIN_END or task.shard.records > 0
        for _, other in self.live():
            assert other.task.id != task.id, "two workers hold the same task"
        self.check_turn(task.type)
        if task.type is TaskType.TRAINING:
            is_again = self.handed_out.issuperset(self.records(task))  # as after the loss of a server
            if not is_again and (task.epoch, task.shard.name, task.shard.end) not in self.split_off:
                self.batches.setdefault(task.id, -(-task.shard.records // self.batch))
            self.handed_out.update(self.records(task))
        if not answer_lost:
            self.held[place].append(lease)
            self.progress[lease.id] = 0
        return decision.kind

    def check_turn(self, kind):
        """Nothing that goes first was left behind, as far as it is to be seen from outside."""
        assert kind is not TaskType.TRAIN_END or not self.live()
        counts = self.queue.counts()
        for earlier in HANDING_OUT_ORDER[: HANDING_OUT_ORDER.index(kind)]:
            if earlier is TaskType.TRAINING and (self.hold or self.queue.accounting.tasks_split):
                continue  # a held epoch is to do, but not yet to be handed out; nor what is for an idle worker
            if self.queue.accounting.tasks_retried:
                continue  # what failed here may wait for another worker
            assert counts[earlier][TaskState.TODO] == 0 or self.max_batches

    @precondition(lambda self: self.live())
    @rule(pick=PICK, part=st.sampled_from([0.0, 0.3, 0.7, 1.0]), is_held=st.booleans())
    def report_progress(self, pick, part, is_held):
        live = self.live()
        place, lease = live[pick % len(live)]
        before = self.progress[lease.id]
        done = before + round((lease.task.shard.records - before) * part)
        assert self.queue.report_progress(self.ids[place], lease.id, done, self.now, is_held=is_held).accepted
        self.progress[lease.id] = done
        if is_held and done > before:
            self.end_lease(lease)  # what is late
        if lease.task.type is not TaskType.EVALUATION:
            self.credit(lease, before, done)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, is_held=st.booleans())
    def report_done(self, pick, is_held=True):
        place, lease = self.drop(pick)
        outcome = self.queue.report_done(self.ids[place], lease.id, is_held=is_held)
        assert outcome.accepted
        assert not outcome.duplicate
        assert outcome.task == lease.task
        start = 0 if lease.task.type is TaskType.EVALUATION else self.progress[lease.id]
        if is_held:
            self.end_lease(lease)  # what is late
        self.credit(lease, start, lease.task.shard.records)
        self.end_lease(lease)
        self.done = [*self.done[-5:], (self.ids[place], lease)]
        self.last_report[self.ids[place]] = lease.id

    @precondition(lambda self: self.live())
    @rule(pick=PICK, part=st.sampled_from([0.0, 0.0, 0.4, 0.8, 1.0]), again=st.booleans())
    def split(self, pick, part, again):
        """A worker agrees to leave what it has not begun, of a batch at least, to others."""
        live = self.live()
        place, lease = live[pick % len(live)]
        task, records = lease.task, lease.task.shard.records
        begun = self.progress[lease.id]
        whole = -(-begun // self.batch) * self.batch  # a worker ends the batch that it has begun
        end = min(records, whole + round(max(0, records - whole) * part / self.batch) * self.batch)
        if task.type is not TaskType.TRAINING:
            with pytest.raises(WireError, match="training task"):
                self.queue.split(self.ids[place], lease.id, end)
            return
        splits = self.queue.accounting.tasks_split
        assert self.queue.split(self.ids[place], lease.id, end).accepted
        assert self.queue.accounting.tasks_split == splits + (end < records)
        at = self.held[place].index(lease)
        if end == 0:
            del self.held[place][at]
            self.end_lease(lease)
            self.dead.append((self.ids[place], lease))
            return
        shorter = replace(task, shard=Shard(task.shard.name, task.shard.start, task.shard.start + end))
        self.held[place][at] = replace(lease, task=shorter)
        if end < records:
            ends = (task.shard.end, shorter.shard.end)
            self.split_off.update((task.epoch, task.shard.name, shard_end) for shard_end in ends)
        if again:
            assert self.queue.split(self.ids[place], lease.id, end).accepted

    @precondition(lambda self: self.done)
    @rule(pick=PICK)
    def report_done_again(self, pick):
        worker, lease = self.done[pick % len(self.done)]
        assert self.queue.report_done(worker, lease.id).duplicate

    @precondition(lambda self: self.dead)
    @rule(pick=PICK, done=st.booleans())
    def report_too_late(self, pick, done):
        worker, lease = self.dead[pick % len(self.dead)]
        refused = self.queue.accounting.reports_refused
        if done:
            assert not self.queue.report_done(worker, lease.id).accepted
        else:
            assert not self.queue.report_progress(worker, lease.id, 0, self.now).accepted
        assert self.queue.accounting.reports_refused == refused + 1

    @precondition(lambda self: self.live())
    @rule(pick=PICK)
    def report_failed(self, pick):
        place, lease = self.drop(pick)
        assert self.queue.report_failed(self.ids[place], lease.id, "boom", "Traceback").accepted
        self.last_report[self.ids[place]] = lease.id
        self.end_lease(lease)
        self.dead.append((self.ids[place], lease))

    @rule(place=WORKERS, politely=st.booleans())
    def lose_worker(self, place, politely=False):
        (self.queue.worker_left if politely else self.queue.worker_lost)(self.ids[place])
        self.dead += [(self.ids[place], lease) for lease in self.held[place]]
        self.end_leases(self.held[place])
        self.held[place] = []
        self.ids[place] = self.next_worker
        self.next_worker += 1

    @rule(seconds=st.sampled_from([1.0, 40.0, LEASE_SECONDS]))
    def let_time_pass(self, seconds):
        self.now += seconds
        over = {lease.id for lease in self.queue.expire(self.now)}
        for place, leases in self.held.items():
            gone = [lease for lease in leases if lease.id in over]
            self.dead += [(self.ids[place], lease) for lease in gone]
            self.end_leases(gone)
            self.held[place] = [lease for lease in leases if lease.id not in over]
        if seconds == LEASE_SECONDS:
            assert not any(self.held.values())

    @precondition(lambda self: len(self.rounds) < 3)
    @rule(sources=SOURCES)
    def add_round(self, sources):
        number = len(self.rounds) + 1
        self.rounds[number] = sources
        self.queue.add_evaluation(number, sources)

    @rule()
    def release_epochs(self):
        self.queue.release_epoch(sum(m.kind is MilestoneKind.EPOCH_DONE for m in self.milestones) - 1)

    @precondition(lambda self: len(self.handed_out) > 20)
    @rule(before_batch=st.booleans())
    def stop_training(self, before_batch):
        self.stopped |= not self.queue.training_done
        self.queue.stop_training("enough", before_batch)

    @rule()
    def add_train_end(self):
        self.queue.add_train_end()

    @rule()
    def servers_begin_to_save(self):
        self.saving = (self.queue.begin_save(), set(self.unsaved))

    @precondition(lambda self: self.saving)
    @rule()
    def servers_have_saved(self):
        mark, records = self.saving
        self.queue.saved(mark)
        self.unsaved -= records
        self.saving = None

    @rule()
    def lose_server(self):
        self.queue.updates_lost()
        self.lose(self.unsaved)
        self.unsaved = set()
        self.saving = self.saving and (self.saving[0], set())
        if self.repeats:
            for _, lease in self.live():
                self.late.setdefault(lease.id, set())

    @precondition(lambda self: self.queue.failure is None and not self.rounds)
    @rule(servers_are_lost=st.booleans())
    def save_and_restore(self, servers_are_lost):
        """From the journal, after all processes have ended."""
        saved = json.loads(json.dumps(self.queue.to_dict()))
        self.queue = TaskQueue.from_dict(saved)
        for leases in self.held.values():
            self.end_leases(leases)
        if servers_are_lost:
            self.queue.updates_lost()
            self.lose(self.unsaved)
            self.unsaved = set()
        self.saving = None
        self.held = {place: [] for place in self.held}
        self.done, self.dead = [], []

    @precondition(lambda self: self.queue.failure is None and not self.rounds)
    @rule()
    def another_master_goes_on(self):
        """Workers keep their leases, and may repeat the last report, whose answer may have been lost."""
        saved = json.loads(json.dumps(self.queue.to_dict()))
        self.queue = TaskQueue.from_dict(saved, self.now)
        self.saving = None
        present = set(self.ids.values())
        self.done = [
            (worker, lease) for worker, lease in self.done if worker in present and self.last_report[worker] == lease.id
        ]

    # ---- what must hold

    @invariant()
    def milestones_come_once(self):
        new = self.queue.take_milestones()
        if not new:
            return
        self.milestones += new
        assert len(self.milestones) == len(set(self.milestones))
        epochs = [m.number for m in self.milestones if m.kind is MilestoneKind.EPOCH_DONE]
        assert epochs == list(range(len(epochs)))
        for milestone in new:
            if milestone.kind is MilestoneKind.ROUND_DONE:
                self.check_round(milestone.number)
            if milestone.kind is MilestoneKind.EPOCH_DONE and not (self.stopped or self.max_batches or self.repeats):
                self.check_epoch(milestone.number)
            if milestone.kind is MilestoneKind.TRAINING_DONE:
                assert not self.unsaved
                assert not any(self.late.values())

    def check_round(self, number):
        for name, count in self.rounds[number]:
            assert all((TaskType.EVALUATION, number, name, r) in self.credited for r in range(count))

    def check_epoch(self, epoch):
        for name, count in self.training:
            assert all((TaskType.TRAINING, epoch, name, r) in self.credited for r in range(count))

    @invariant()
    def what_was_trained_is_counted(self):
        assert self.queue.accounting.records_trained == self.trained

    @invariant()
    def max_batches_is_kept(self):
        assert not self.max_batches or sum(self.batches.values()) <= self.max_batches

    @invariant()
    def doing_is_what_workers_hold(self):
        """All but the leases whose answers got lost."""
        leases = {lease.id for lease in self.queue.leases()}
        assert leases >= {lease.id for held in self.held.values() for lease in held}
        doing = sum(states[TaskState.DOING] for states in self.queue.counts().values())
        assert doing == len(leases)

    def teardown(self):
        """One more worker does all that is left, and the job is done."""
        if not hasattr(self, "queue"):
            return
        for place in self.held:
            self.lose_worker(place)
        self.queue.add_train_end()
        self.queue.finish()
        for _ in range(2000):
            self.milestones_come_once()
            self.release_epochs()
            if self.take_one(0) is DecisionKind.TASK:
                self.report_done(0)
            elif self.queue.wants_save:
                self.servers_begin_to_save()
                self.servers_have_saved()
            else:
                break
        assert self.queue.get_task(99_999, self.now).kind is DecisionKind.FINISHED
        self.what_was_trained_is_counted()
        if self.queue.failure is None:
            self.check_the_end()

    def check_the_end(self):
        assert not self.queue.leases()
        counts = self.queue.counts()
        assert all(states[TaskState.TODO] == states[TaskState.DOING] == 0 for states in counts.values())
        for number in self.rounds:
            self.check_round(number)
        for name, count in self.prediction:
            assert all((TaskType.PREDICTION, 0, name, r) in self.credited for r in range(count))
        kinds = Counter(m.kind for m in self.milestones)
        assert kinds[MilestoneKind.TRAINING_DONE] == kinds[MilestoneKind.PREDICTION_DONE] == 1
        assert kinds[MilestoneKind.TRAIN_END_DONE] == 1
        assert kinds[MilestoneKind.ROUND_DONE] == len(self.rounds)
        trained = {key for key in self.credited if key[0] is TaskType.TRAINING}
        everything = {
            (TaskType.TRAINING, epoch, name, r)
            for epoch in range(self.epochs)
            for name, count in self.training
            for r in range(count)
        }
        if self.stopped:
            assert trained <= everything
            self.check_dropped(trained)
        elif self.max_batches:
            assert trained == self.handed_out
            assert trained == everything or sum(self.batches.values()) == self.max_batches
        else:
            assert trained == everything
            assert kinds[MilestoneKind.EPOCH_DONE] == (self.epochs if everything else 0)

    def check_dropped(self, trained):
        """Of an epoch that was begun, each record was either trained or dropped (or cut by max_batches)."""
        dropped = self.queue.accounting.records_dropped
        size = sum(count for _, count in self.training)
        for epoch in {key[1] for key in trained}:
            known = sum(key[1] == epoch for key in trained) + dropped.get(epoch, 0)
            assert known == size or (self.max_batches and known < size)

    # ---- helpers

    def live(self):
        return [(place, lease) for place, leases in self.held.items() for lease in leases]

    def drop(self, pick):
        live = self.live()
        place, lease = live[pick % len(live)]
        self.held[place].remove(lease)
        return place, lease

    def credit(self, lease, start, end):
        task, first = lease.task, lease.task.shard.start
        assert task.type is TaskType.TRAIN_END or first + end <= task.shard.end
        for record in self.records(task)[start:end]:
            assert record not in self.credited, f"{record} is counted twice"
            self.credited.add(record)
        if task.type is TaskType.TRAINING and start < end:
            self.trained[task.epoch] += end - start
            if self.repeats:
                self.late.get(lease.id, self.unsaved).update(self.records(task)[start:end])

    def end_lease(self, lease):
        self.lose(self.late.pop(lease.id, set()))

    def end_leases(self, leases):
        for lease in leases:
            self.end_lease(lease)

    def lose(self, records):
        """The records have to be trained again."""
        self.credited -= records
        for record in records:
            self.trained[record[1]] -= 1

    def records(self, task):
        number = task.evaluation_round if task.type is TaskType.EVALUATION else task.epoch
        return [(task.type, number, task.shard.name, r) for r in range(task.shard.start, task.shard.end)]


TestTaskQueueKeepsItsPromises = TaskQueueMachine.TestCase
# ELASTICCB_EXAMPLES=10000 makes it a run of minutes; task_queue_walks.py goes faster.
TestTaskQueueKeepsItsPromises.settings = settings(
    max_examples=int(os.environ.get("ELASTICCB_EXAMPLES", 100)),
    stateful_step_count=60,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
