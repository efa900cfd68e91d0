"""The master as its calls see it: it turns them into events of the current job's `JobMachine`, under one lock, and
carries the effects out: journal, processes, lines for the user, and who wakes up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from elasticcb.cluster.base import ClusterBackend
from elasticcb.errors import (
    CallbackError,
    ElasticCBError,
    JobFailedError,
    JobOverError,
    UsageError,
    WireError,
    describe,
    user_traceback,
)
from elasticcb.master.events import Effects, Wake
from elasticcb.master.job_history import JobHistory
from elasticcb.master.job_machine import OTHERS_FIRST, JobMachine
from elasticcb.master.journal import Journal
from elasticcb.master.locked import Locked
from elasticcb.master.members import Member, Role, ServedCluster
from elasticcb.master.processes import Processes
from elasticcb.master.roster import Roster
from elasticcb.master.task import DecisionKind, Outcome, TaskDecision, TaskResult
from elasticcb.master.task_queue import TaskQueue
from elasticcb.model.metric_messages import Outputs
from elasticcb.process import forwarded_logs
from elasticcb.process.log_files import may_reach_nobody
from elasticcb.process.signals import interrupt
from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.security.credentials import OPEN, Access
from elasticcb.settings import MOST_WORKERS, ClusterSettings, Command, JobSettings
from elasticcb.sharding.partition import ServerPlace

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_TICK_SECONDS = 0.25  # between checks of processes and deadlines when nothing happens
_OTHERS_SECONDS = 0.05  # after which a worker looks again whether others still come first


def _of_job(method: Callable[Concatenate[JobMachine, P], R]) -> Callable[Concatenate[MasterServer, P], R]:
    """The method of the current job, under the lock."""

    @functools.wraps(method)
    def call(self: MasterServer, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.state() as state:
            return method(state, *args, **kwargs)

    return call


class MasterServer:
    """One job after another. Answers calls, each in the thread of its caller; the watchdog, and the thread that drives
    the job, are others.
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
        self.history_before: Mapping[str, Any] = {}  # of a job that is resumed
        self.ready = False  # as `JobMachine.ready`; readable without the lock
        self.end_calls: Callable[[int], None] = lambda index: None  # called with the index of each lost server
        # Called with the index of a server that leaves, and what it has saved after its last answer.
        self.take_last: Callable[[int, pb.SaveResponse], None] = lambda index, saved: None
        self._show = show
        self.show_printed: Callable[[str, bool], None] = _print  # shows text of a worker, to standard error or output
        self._journal: Journal | None = None  # of a job that can be resumed
        roster = Roster(cluster.num_workers, cluster.num_ps, cluster.max_worker_restarts, cluster.max_ps_restarts)
        say_of_process = functools.partial(self.print, kind="loss")
        self._processes = Processes(roster, backend, self._worker_lost, self._server_lost, say_of_process)
        self._locked = Locked(JobMachine(roster, backend.separate), self._settle)
        self._interrupted = False  # a stop was requested

    def state(self) -> AbstractContextManager[JobMachine]:
        """The current job, to look at it, or for an event: `with master.state() as state:` holds the master's lock."""
        return self._locked()

    @contextlib.contextmanager
    def change(self, wakes: Wake = Wake.ALL) -> Iterator[JobMachine]:
        """As `state`, for changes of any part: they are persisted when the block ends, and before it waits, and these
        threads wake up."""
        with self._locked() as state:
            state.changed(wakes)
            try:
                yield state
            finally:
                state.changed(wakes)

    def wait_for(self, condition: Callable[[JobMachine], bool], seconds: float | None = None) -> JobMachine:
        """Inside a block: waits until `condition` holds, at most `seconds`; returns the current job's state."""
        return self._locked.wait_for(condition, seconds)

    def wait_a_tick(self) -> None:
        """Inside a block of the driving thread: waits for a change, or until it is time to `tend`."""
        self._locked.wait_as_driver(_TICK_SECONDS)

    @property
    def version(self) -> int:
        """Version of the model, as known to the master."""
        with self.state() as state:
            return state.version

    reached_version = _of_job(JobMachine.reached_version)
    stop_training = _of_job(JobMachine.stop_training)
    warn = _of_job(JobMachine.warn)
    fail = _of_job(JobMachine.fail)
    pause = _of_job(JobMachine.pause)
    set_status = _of_job(JobMachine.set_status)
    close = _of_job(JobMachine.close)

    def checkpoint_failed(self) -> None:
        """A checkpoint could not be written."""
        with self.change(Wake.NOBODY) as state:
            state.totals.checkpoints_failed += 1

    def checkpoint_written(self) -> None:
        """A checkpoint is complete at its destination."""
        with self.state() as state:
            state.checkpoint_written = time.monotonic()
            state.history.record_event("checkpoint", f"A checkpoint is written, at version {state.version}.")

    def exported(self, version: int, path: str) -> None:
        """An export for serving is complete, in this folder of exports."""
        with self.state() as state:
            state.exported = time.monotonic()
            state.set_status(export_path=path, export_version=version)

    def print(self, text: str, kind: str = "note") -> None:
        """Prints a line about the job; the job's page keeps it as an event of this kind."""
        self.record_event(kind, text)
        self._say(text)

    def _say(self, text: str) -> None:
        self._show(text)
        self.backend.note(text)

    def printed(self, worker: int, texts: Iterable[pb.PrintedText]) -> None:
        """Shows what callbacks printed on a worker, and logs here what they logged there. Don't call it while holding
        the state, like `print`."""
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

    def record_event(self, kind: str, text: str) -> None:
        """See `JobHistory.record_event`."""
        with self.state() as state:
            state.history.record_event(kind, text)

    def _settle(self, state: JobMachine) -> Wake:
        effects = state.take_effects()
        if self._journal is not None and effects.changed:
            try:
                persist(self._journal, state, effects)
            except JobFailedError as error:
                state.error = error
        for line in effects.lines:
            state.history.record_event("note", line)
            self._say(line)
        self.ready = state.ready
        return effects.wake

    # ------------------------------------------------------------ jobs

    def begin_job(
        self,
        settings: JobSettings,
        program: bytes = b"",
        datasets: Mapping[int, bytes] | None = None,
        started: float | None = None,
    ) -> None:
        """Starts a job on the processes, with the arguments of `JobMachine`; the previous job must be done."""
        started = time.monotonic() if started is None else started
        with self.state() as last:
            self._journal = None
            last.roster.losses.recovers_ps = _recovers_ps(settings)
            state = last.next_job(settings, program, datasets, started)
            state.changed()
            state.history = JobHistory(time.time, self.history_before)
            self._locked.replace(state)

    def keep(self, journal: Journal | None) -> None:
        """Persists the job's state in this journal from now on; None: stop doing so."""
        with self.state():
            self._journal = journal

    @property
    def has_journal(self) -> bool:
        """Whether the job can be resumed."""
        return self._journal is not None

    def check_is_ours(self) -> None:
        """Raises `ReplacedError` when another master has taken over the job, and `JobFailedError` as `Journal.add`."""
        with self.state():
            if self._journal is not None:
                self._journal.check_is_ours()

    def sync_journal(self) -> None:
        """Returns once the last compaction of the journal is on disk; does not hold the lock. Raises
        `JobFailedError`."""
        journal = self._journal
        if journal is not None:
            journal.sync()

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
            self._raise_failure(state)
            for lease in state.expire(time.monotonic()):
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
            state.processes_checked()
            self._raise_failure(state)
            state.raise_if_nobody_is_left()

    def _raise_failure(self, state: JobMachine) -> None:
        failure = state.queue.failure if state.queue is not None else None
        if failure is not None:
            raise failure.to_error(self._processes.where(failure.worker))

    def wait_until(self, condition: Callable[[JobMachine], bool], seconds: float) -> None:
        """Waits for processes to finish, noting those that exit by themselves; gives up after `seconds`."""
        give_up = time.monotonic() + seconds
        with self.state() as state:
            while not condition(state) and time.monotonic() < give_up:
                self.wait_a_tick()
                self._processes.note_ended()

    def resize(self, role: Role, size: int) -> None:
        """Changes the number of workers or parameter servers."""
        with self.change() as state:
            self._processes.resize(role, size)
            if role is Role.WORKER:
                state.persist(workers=size)

    def servers_have_moved(self, servers: Sequence[ServerPlace], map_version: int) -> None:
        """These servers now hold the model; the others may leave."""
        with self.change() as state:
            state.servers_have_moved(servers, map_version)
            self._processes.resize(Role.PS, len(servers))

    def replace(self, member: Member, reason: str) -> None:
        """Kills a hung process; another replaces it."""
        with self.change() as state:
            try:
                self._processes.replace(member, reason)
            except JobFailedError as failure:
                state.error = failure

    def lost(self, id: int, reason: str) -> None:
        """A process is lost; another replaces it. Raises `JobFailedError` when none can."""
        with self.change():
            self._processes.lost(id, reason)

    def asked_to_end(self, member: Member, reason: str) -> None:
        """A process stopped because its machine is needed; another replaces it."""
        with self.change() as state:
            if state.over and member.role is Role.WORKER:  # no replacement needed
                state.roster.left(member.id)
                return
            state.worker_left(member)
            try:
                self._processes.asked_to_end(member, reason)
            except JobFailedError as failure:
                state.error = failure

    def _worker_lost(self, worker: int) -> None:
        with self.state() as state:
            state.worker_lost(worker)

    def _server_lost(self, index: int) -> None:
        with self.state() as state:
            state.server_lost(index, time.monotonic())
            self.end_calls(index)

    # ------------------------------------------------------------ calls of processes

    def next_job(self, after: int, id: int, seconds: float, known_lost: int = 0) -> tuple[int, JobSettings | None]:
        """Waits up to `seconds` for a job newer than `after`, which process `id` (0: not registered) has finished."""
        with self.state() as state:
            if id:
                state.idle(id, time.monotonic())
            roster = state.roster
            serves = roster.is_up(id, Role.PS)
            state = self.wait_for(
                lambda state: (
                    state.number > after
                    or state.closing
                    or (serves and len(roster.lost_workers) > known_lost)
                    or roster.released(id)
                ),
                seconds,
            )
            return (state.number, state.settings) if state.number > after and not state.closing else (0, None)

    def program_of(self, job: int, dataset: int = 0) -> bytes:
        """The serialized job, or the function that creates a per-worker dataset."""
        with self.state() as state:
            state.check_is_present(job)
            if dataset and dataset not in state.datasets:
                raise WireError(
                    f"Per-worker dataset {dataset} does not exist. Known datasets: {sorted(state.datasets) or 'none'}."
                )
            return state.datasets[dataset] if dataset else state.program

    def index_of(self, job: int, mode: str, file: str) -> bytes:
        """Byte offsets of a file's records, for workers; b"" while unknown."""
        with self.state() as state:
            state.check_is_present(job)
            if state.over:
                raise JobOverError(f"Job {job} is over.")
            find = state.find_index
        return find(mode, file)

    def register(self, role: Role, index: int, address: str, pid: int, host: str, job: int = 1) -> Member:
        """Registers a process in a slot."""
        with self.state() as state:
            return state.register(role, index, address, pid, host, time.monotonic(), job)

    def wait_for_cluster(self, id: int, seconds: float, map_version: int = 0) -> ServedCluster | None:
        """The servers, once all hold the model by a shard map of at least this version."""
        with self.state() as state:
            state.seen(id, time.monotonic())
            job = state.roster.job_of(id)
            state = self.wait_for(
                lambda state: state.serves(map_version) or state.closing or job != state.number, seconds
            )
            if state.closing:
                raise JobFailedError("The job ended before it started.")
            state.check_is_present(job)
            return state.cluster if state.serves(map_version) else None

    def leave(
        self,
        id: int,
        error: str,
        traceback: str,
        fatal: bool,
        asked: bool = False,
        saved: pb.SaveResponse | None = None,
    ) -> None:
        """A process exits, with or without an `error`; or because it was `asked` to.

        Args:
            saved: what a server has saved after its last answer.
        """
        if saved is not None:
            with self.state() as state:
                server = None if state.closing else state.roster.member(id)
            if server is not None:  # it waits for the answer; not under the lock, because this writes files
                self.take_last(server.index, saved)
        with self.change() as state:
            member = state.roster.member(id)
            if asked and member is not None and not state.closing:
                self.asked_to_end(member, error)
            elif error and member is not None and not state.closing:
                logger.warning("%s leaves: %s\n%s", member, error, traceback)
                try:
                    if fatal or state.over:  # would fail again, or needs no retry
                        state.roster.left(id)
                        when = " after its last task" if state.over else ""
                        raise JobFailedError(f"{member} failed{when}: {error}")
                    self.lost(id, error)
                except JobFailedError as failure:
                    failure.user_traceback = traceback
                    state.error = failure
            elif member is not None:
                state.left(id)

    def not_started(self, role: Role, index: int, error: str, traceback: str) -> None:
        """A process failed before it could register; a replacement would fail the same way."""
        place = f"{role.value} {index}" if index >= 0 else f"a {role.value}"
        failure = JobFailedError(f"{place} could not start: {error}", traceback)
        with self.state() as state:
            if not self.backend.watches:
                state.print(str(failure))  # whoever started it may retry
            elif not state.closing:
                state.fail(failure)

    # ------------------------------------------------------------ calls about tasks

    def get_task(
        self, worker: int, held: Collection[int], seconds: float, waits: Callable[[], bool] = lambda: True
    ) -> TaskDecision:
        """Waits up to `seconds` for a task, which is handed out only while the worker still `waits` for it."""
        give_up = time.monotonic() + seconds
        with self.state() as state:
            while True:
                now = time.monotonic()
                if not waits():
                    state.seen(worker, now)
                    return TaskDecision(DecisionKind.WAIT, None, "the worker closed the call")
                decision = state.get_task(worker, held, now)
                left = give_up - now
                if decision.kind is not DecisionKind.WAIT or left <= 0 or state.must_tell(worker, decision):
                    if decision.kind is DecisionKind.WAIT:
                        state.waits_for_task(worker, decision)
                    return decision
                state.waiting.add(worker)
                state = self._locked.wait(min(left, _OTHERS_SECONDS) if decision.reason == OTHERS_FIRST else left)
                state.waiting.discard(worker)

    def report_done(self, worker: int, lease: int, result: TaskResult) -> Outcome:
        """A worker has finished a task."""
        # possibly slow, so before taking the lock
        with self._staged(result.outputs) as staged, self.state() as state:
            outcome = state.report_done(worker, lease, time.monotonic(), result)
            output = state.prediction_output
            if outcome.counts and outcome.task is not None and staged is not None and output is not None:
                try:
                    output.commit(staged, outcome.task.shard, result.outputs)
                except ElasticCBError as error:
                    state.fail(error)  # without this part, the output file would be incomplete
            return outcome

    @contextlib.contextmanager
    def _staged(self, outputs: list[Outputs]) -> Iterator[Path | None]:
        """A part of `--output`; it counts once committed."""
        with self.state() as state:
            output = state.prediction_output
        if output is None or not outputs:
            yield None
            return
        path = output.stage(outputs)
        try:
            yield path
        finally:
            output.discard(path)

    # ------------------------------------------------------------ calls of users

    def scale(self, workers: int) -> int:
        """Changes the number of workers; returns the previous number.

        Raises `UsageError` when the job can't have that number.
        """
        with self.state() as state:
            before, most = state.roster.size(Role.WORKER), max(self.cluster.num_workers, MOST_WORKERS)
            if not 1 <= workers <= most:
                raise UsageError(f"{workers} workers is invalid: must be from 1 to {most}.")
            state.check_under_way()
            if state.settings is not None and state.settings.command is Command.CALL:
                raise UsageError("The workers of Cluster.schedule can't be scaled.")
            if workers > 1 and state.shared_callbacks is not None and state.shared_callbacks.names:
                raise UsageError(
                    f"The job can't have {workers} workers: hooks of {state.shared_callbacks.names} on its one worker "
                    "share their state with hooks in the program. Run it again with more workers."
                )
            if workers != before:
                self.resize(Role.WORKER, workers)
                state.print(f"The job now has {how_many(workers, 'worker')} (was {before}).")
            if state.autoscales:
                state.end_autoscaling("the number of workers was set manually")
            return before

    def interrupt(self) -> None:
        """Stops the job like Ctrl-C, by interrupting the main thread; repeated calls have no effect.

        Raises `UsageError` when this process does not belong to a command.
        """
        with self.state() as state:
            if signal.getsignal(signal.SIGTERM) is not interrupt:
                raise UsageError("A Python program runs this job. Stop that program instead.")
            if not self._interrupted and not state.closing:
                self._interrupted = True
                logger.info("Stop requested")
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _recovers_ps(settings: JobSettings) -> bool:
    """Whether a replacement can restore a lost server: from recovery files, or from weights that never change."""
    return settings.command in (Command.EVALUATE, Command.PREDICT) or settings.checkpoint.interval_seconds > 0


def _print(text: str, is_error: bool) -> None:
    stream = sys.stderr if is_error else sys.stdout
    with may_reach_nobody(stream):
        print(text, file=stream, flush=True)


def persist(journal: Journal, state: JobMachine, effects: Effects) -> None:
    """Brings the journal to the state of the machine. Raises `JobFailedError` when that is not possible."""
    saved = state.to_dict()
    if saved is None:
        return
    facts = effects.facts
    if effects.restarted:
        facts["restarted"] = effects.restarted
    if effects.states:
        facts["states"] = effects.states
    journal.add(saved, **facts)
    if effects.compacts or journal.is_large:
        journal.rewrite(state.epoch_states.to_journal())
