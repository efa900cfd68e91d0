"""Holds the current job's state under its lock, and applies its effects to journal, processes and user."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Generic, TypeVar

from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.clients.ps_places import ServerPlace
from elasticcb.cluster.base import ClusterBackend
from elasticcb.errors import CallbackError, JobFailedError, describe, user_traceback
from elasticcb.master.job_record import Crew
from elasticcb.master.job_state import JobState
from elasticcb.master.journal import Journal
from elasticcb.master.members import Member, Role
from elasticcb.master.past import Past
from elasticcb.master.processes import Processes
from elasticcb.master.roster import Roster
from elasticcb.master.task_queue import TaskQueue
from elasticcb.process import forwarded_logs
from elasticcb.process.log_files import may_reach_nobody
from elasticcb.process.signals import raise_if_interrupted, uninterrupted
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.security.credentials import OPEN, Access
from elasticcb.settings import ClusterSettings, Command, JobSettings

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25  # between checks of processes and deadlines when nothing happens
_LOOK_SECONDS = 0.1  # between checks for Ctrl-C, which does not interrupt waits here

Value = TypeVar("Value")


class Desk:
    """One job after another, as seen by the threads that work for the master: servicer, watchdog, and the thread that
    drives the job.
    """

    def __init__(
        self,
        cluster: ClusterSettings,
        backend: ClusterBackend,
        show: Callable[[str], None],
        address: str = "",
        access: Access = OPEN,
    ) -> None:
        self.cluster, self.backend, self.address, self.access = cluster, backend, address, access
        self.past_before: Mapping[str, Any] = {}  # of a job that is resumed
        self.ready = False  # as `JobState.ready`; readable without the lock
        self.end_calls: Callable[[int], None] = lambda index: None  # called with the index of each lost server
        # Called with the index of a server that leaves, and what it has saved after its last answer.
        self.take_last: Callable[[int, pb.SaveResponse], None] = lambda index, saved: None
        self._show = show
        self.show_printed: Callable[[str, bool], None] = _print  # shows text of a worker, to standard error or output
        self._journal: Journal | None = None  # of a job that can be resumed
        roster = Roster(cluster.num_workers, cluster.num_ps, cluster.max_worker_restarts, cluster.max_ps_restarts)
        say_of_process = functools.partial(self.say, kind="loss")
        self._processes = Processes(roster, backend, self._worker_lost, self._server_lost, say_of_process)
        self._guarded = Guarded(JobState(Crew(roster)), self._settle)

    def state(self) -> AbstractContextManager[JobState]:
        """The only access to the current job: `with desk.state() as state:` holds the master's lock."""
        return self._guarded()

    def wait(self, seconds: float) -> JobState:
        """Inside a block: waits for a change, at most `seconds`; returns the current job's state."""
        return self._guarded.wait(seconds)

    def wait_for(self, condition: Callable[[JobState], bool], seconds: float | None = None) -> JobState:
        """Inside a block: waits until `condition` holds, at most `seconds`; returns the current job's state."""
        return self._guarded.wait_for(condition, seconds)

    def wait_a_tick(self) -> None:
        """Inside a block of the driving thread: waits for a change, or until it is time to `tend`."""
        self._guarded.wait_as_driver(_TICK_SECONDS)

    @property
    def version(self) -> int:
        """Version of the model, as known to the master."""
        with self.state() as state:
            return state.version

    def reached_version(self, version: int) -> None:
        """The model is, or was, at `version`."""
        with self.state() as state:
            state.reached_version(version)

    def stop_training(self, reason: str, before_batch: bool = False) -> None:
        """Requests the end of training; `before_batch` as in `TaskQueue.stop_training`."""
        with self.state() as state:
            state.stop_training(reason, before_batch)

    def warn(self, warning: CallbackWarning) -> None:
        """Counts the warning; shows the first one of each subject."""
        with self.state() as state:
            state.warn(warning)

    def fail(self, error: Exception) -> None:
        """Ends the job with this error."""
        with self.state() as state:
            state.error = error
            state.wake()

    def pause(self, who: str, why: str) -> None:
        """Hands out no tasks for this reason of `who`; "": for none of it any more."""
        with self.state() as state:
            if state.queue is not None and state.queue.pause(who, why):
                state.wake()

    def checkpoint_failed(self) -> None:
        """A checkpoint could not be written."""
        with self.state() as state:
            state.totals.checkpoints_failed += 1

    def checkpoint_written(self) -> None:
        """A checkpoint is complete at its destination."""
        with self.state() as state:
            state.checkpoint_written = time.monotonic()
            state.past.happened("checkpoint", f"A checkpoint is written, at version {state.version}.")

    def say(self, text: str, kind: str = "note") -> None:
        """Prints a line about the job; the job's page keeps it as an event of this kind."""
        self.happened(kind, text)
        self._say(text)

    def _say(self, text: str) -> None:
        self._show(text)
        self.backend.note(text)

    def printed(self, worker: int, texts: Iterable[pb.PrintedText]) -> None:
        """Shows what callbacks printed on a worker, and logs here what they logged there. Don't call it while holding
        the state, like `say`."""
        with self.state() as state:
            member = state.roster.member(worker)
        if member is not None:
            for text in texts:
                lines = text.text.removesuffix("\n").split("\n")
                if text.is_record:
                    self._log(lines, f"worker-{member.index}")
                else:
                    shown = "\n".join(f"{line}  [worker {member.index}]" for line in lines)
                    self.show_printed(shown, text.is_error)

    def _log(self, records: Iterable[str], process: str) -> None:
        try:
            for record in records:
                forwarded_logs.handle(record, process)
        except Exception as error:
            message = f"A handler or filter failed for a record that a hook logged on {process}: {describe(error)}"
            self.fail(CallbackError(message, user_traceback(error)))

    def happened(self, kind: str, text: str) -> None:
        """See `Past.happened`."""
        with self.state() as state:
            state.past.happened(kind, text)

    def _settle(self, state: JobState) -> Wake:
        effects = state.take_effects()
        if self._journal is not None:
            try:
                for entry in effects.entries:
                    self._journal.add(**entry)
                if effects.shortens or (effects.entries and self._journal.is_large):
                    self._journal.rewrite(state.epoch_states.to_journal())
            except JobFailedError as error:
                state.error = error
        for line in effects.lines:
            state.past.happened("note", line)
            self._say(line)
        self.ready = state.ready
        return Wake.ALL if effects.everybody else Wake.DRIVER if effects.driver else Wake.NOBODY

    # ------------------------------------------------------------ jobs

    def begin_job(
        self,
        settings: JobSettings,
        program: bytes = b"",
        datasets: Mapping[int, bytes] | None = None,
        started: float | None = None,
    ) -> None:
        """Starts a job on the processes, with the arguments of `JobState`; the previous job must be done."""
        started = time.monotonic() if started is None else started
        with self.state() as last:
            self._journal = None
            last.roster.losses.recovers_ps = _recovers_ps(settings)
            state = JobState(last.crew, last.number + 1, settings, program, datasets, started)
            state.wake()
            state.past = Past(time.time, self.past_before)
            self._guarded.replace(state)

    def tell(self, **news: Any) -> None:
        """See `JobState.tell`."""
        with self.state() as state:
            state.tell(**news)

    def keep(self, journal: Journal | None) -> None:
        """Persists the job's state in this journal from now on; None: stop doing so."""
        with self.state() as state:
            self._journal, state.has_journal = journal, journal is not None

    def sync_journal(self) -> None:
        """Returns once the last compaction of the journal is on disk; does not hold the lock. Raises
        `JobFailedError`."""
        journal = self._journal
        if journal is not None:
            journal.sync()

    def close(self) -> None:
        """Releases all waiting calls, and announces that no more jobs will come."""
        with self.state() as state:
            state.crew.closing = True
            state.wake()

    def take_over(self, journal: Journal, queue: TaskQueue, running: Mapping[tuple[str, int], int | str]) -> None:
        """Takes over the workers and servers of a killed master, with its queue."""
        memory = journal.memory
        with self.state() as state:
            now = time.monotonic()
            self.keep(journal)
            state.take_over(memory, queue, now)
            self._processes.take_over(running)
            if memory.workers:  # may be newer than the roster
                self._processes.resize(Role.WORKER, memory.workers)
            self._processes.resize(Role.PS, len(memory.servers))  # additional ones hold no data yet
            for index, (_, id) in enumerate(memory.servers):
                server = state.roster.at(Role.PS, index)
                if server is None or server.id != id:  # may be up, but holds no model yet
                    state.lost_ps.setdefault(index, now)

    # ------------------------------------------------------------ processes

    def start_processes(self) -> None:
        """Requests missing processes. With threads, `tend` starts them: TensorFlow can't be imported by several threads
        at once, and a model's seeds are global to the process."""
        if self.backend.separate:
            with self.state():
                self._processes.start_missing(self.address)

    def tend(self) -> None:
        """Checks processes and leases. Raises the error that ends the job."""
        with self.state() as state:
            state.raise_error()
            if state.queue is not None:
                self._raise_failure(state)
                # A thread without progress may be at a breakpoint, and can't be killed anyway.
                for lease in state.queue.expire(time.monotonic(), state.lacks_servers) if self.backend.separate else ():
                    logger.warning("Worker %d made no progress on %s; its lease is over", lease.worker, lease.task)
                    member = state.roster.member(lease.worker)
                    if member is not None:
                        self._processes.replace(member, "it made no progress on its task")
            try:
                self._processes.check()
            except JobFailedError as failure:
                state.error = failure  # raise it again at the next call, in case the caller ignores it
                raise
            self._processes.start_missing(self.address)
            state.note_roster()
            self._raise_failure(state)
            state.raise_if_nobody_is_left()

    def _raise_failure(self, state: JobState) -> None:
        failure = state.queue.failure if state.queue is not None else None
        if failure is not None:
            raise failure.to_error(self._processes.where(failure.worker))

    def wait_until(self, condition: Callable[[JobState], bool], seconds: float) -> None:
        """Waits for processes to finish, noting those that exit by themselves; gives up after `seconds`."""
        give_up = time.monotonic() + seconds
        with self.state() as state:
            while not condition(state) and time.monotonic() < give_up:
                self.wait_a_tick()
                self._processes.note_ended()

    def resize(self, role: Role, size: int) -> None:
        """Changes the number of workers or parameter servers."""
        with self.state() as state:
            self._processes.resize(role, size)
            if role is Role.WORKER:
                state.note(workers=size)
            state.wake()

    def servers_have_moved(self, servers: Sequence[ServerPlace], map_version: int) -> None:
        """These servers now hold the model; the others may leave."""
        with self.state() as state:
            state.servers_have_moved(servers, map_version)
            self._processes.resize(Role.PS, len(servers))

    def replace(self, member: Member, reason: str) -> None:
        """Kills a hung process; another replaces it."""
        with self.state() as state:
            try:
                self._processes.replace(member, reason)
            except JobFailedError as failure:
                state.error = failure
            state.wake()

    def lost(self, id: int, reason: str) -> None:
        """A process is lost; another replaces it. Raises `JobFailedError` when none can."""
        with self.state():
            self._processes.lost(id, reason)

    def asked_to_end(self, member: Member, reason: str) -> None:
        """A process stopped because its machine is needed; another replaces it."""
        with self.state() as state:
            if state.over and member.role is Role.WORKER:  # no replacement needed
                state.roster.left(member.id)
                return
            state.worker_left(member)
            try:
                self._processes.asked_to_end(member, reason)
            except JobFailedError as failure:
                state.error = failure
            state.note()

    def _worker_lost(self, worker: int) -> None:
        with self.state() as state:
            state.worker_lost(worker)

    def _server_lost(self, index: int) -> None:
        with self.state() as state:
            state.server_lost(index, time.monotonic())
            self.end_calls(index)


def _recovers_ps(settings: JobSettings) -> bool:
    """Whether a replacement can restore a lost server: from recovery files, or from weights that never change."""
    return settings.command in (Command.EVALUATE, Command.PREDICT) or settings.checkpoint.interval_seconds > 0


def _print(text: str, is_error: bool) -> None:
    stream = sys.stderr if is_error else sys.stdout
    with may_reach_nobody(stream):
        print(text, file=stream, flush=True)


class Wake(IntEnum):
    """Which threads a change concerns; each value includes those before it."""

    NOBODY = 0
    DRIVER = 1  # the driving thread; most reports concern only it
    ALL = 2  # also workers that wait for a task, of which there may be hundreds


class Guarded(Generic[Value]):
    """`with guarded() as value:` is the only access to the value. Blocks of one thread may be nested.

    Args:
        value: initial value.
        settle: applies the effects of a block, still under the lock, and returns which threads to wake. It is called
            when a block ends, and before it waits.
    """

    def __init__(self, value: Value, settle: Callable[[Value], Wake]) -> None:
        lock = threading.RLock()
        self._value, self._settle = value, settle
        self._all, self._driver = threading.Condition(lock), threading.Condition(lock)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Value]:
        with uninterrupted(), self._all:
            try:
                yield self._value
            finally:
                self._end()

    def replace(self, value: Value) -> None:
        """Replaces the value; waiting threads see the new one when they wake up."""
        with uninterrupted(), self._all:
            self._end()
            self._value = value
            self._end()

    def wait(self, seconds: float) -> Value:
        """Inside a block: waits for a change, at most `seconds`; returns the value at that time."""
        self._end()
        _wait(self._all, seconds)
        return self._value

    def wait_for(self, condition: Callable[[Value], bool], seconds: float | None = None) -> Value:
        """Inside a block: waits until `condition` holds, at most `seconds`; returns the value at that time."""
        give_up = None if seconds is None else time.monotonic() + seconds
        while not condition(self._value) and (give_up is None or time.monotonic() < give_up):
            self._end()
            _wait(self._all, math.inf if give_up is None else give_up - time.monotonic())
        return self._value

    def wait_as_driver(self, seconds: float) -> None:
        """Inside a block of the driving thread: waits for a change, at most `seconds`."""
        self._end()
        _wait(self._driver, seconds)

    def _end(self) -> None:
        wake = self._settle(self._value)
        if wake >= Wake.DRIVER:
            self._driver.notify_all()
        if wake is Wake.ALL:
            self._all.notify_all()


def _wait(changed: threading.Condition, seconds: float) -> None:
    """Waits up to `seconds`; in the main thread, raises `KeyboardInterrupt` when interrupted."""
    give_up = time.monotonic() + seconds
    in_main = threading.current_thread() is threading.main_thread()
    most = _LOOK_SECONDS if in_main else math.inf
    woken = False
    while not woken and (left := min(give_up - time.monotonic(), most)) > 0:
        woken = changed.wait(None if left == math.inf else left)
        raise_if_interrupted()
