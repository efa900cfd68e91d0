"""Takes tasks, runs their batches, and hands work to other workers on request."""

from __future__ import annotations

import logging

from elasticcb.clients.master import MasterClient
from elasticcb.errors import ConnectionLostError, LeaveRequestedError
from elasticcb.model.spec import Spec
from elasticcb.process.signals import on_sigterm
from elasticcb.process.system import remove_generated_files
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import JobSettings, Mode
from elasticcb.worker.kept_models import KeptModel
from elasticcb.worker.session import BuiltModel, Session
from elasticcb.worker.task_input import Batch, Event, Finished, Idle, TaskRead, TaskStarted
from elasticcb.worker.task_run import Tally, TaskRun

logger = logging.getLogger(__name__)

_LAST_EPOCH = 2**31 - 1


def run_job(
    settings: JobSettings, client: MasterClient, index: int, spec: Spec, before: KeptModel | None = None
) -> KeptModel | None:
    """Works for a job until the master reports that no more work will come; returns what a later job can use again.

    Args:
        client: the worker registers once its model is built.
        index: index to take; -1: the master chooses.
        before: the model of an earlier job, to which `spec` refers.

    Raises:
        ConnectionLostError: the master or a server is unreachable.
        LeaveRequestedError: SIGTERM was received, or the master needs fewer workers.
        ElasticCBError: the model file, or the cluster, is unusable.
    """
    built = BuiltModel(settings, client, spec, before)
    spec.use_own_seeds(client.register(pb.WORKER, index))
    session = Session(built, client.wait_for_cluster())
    try:
        with on_sigterm(session.input.leave):
            TaskLoop(session).run()
    finally:
        session.close()
    return session.kept()


class TaskLoop:
    """Runs the tasks of a session, one after another."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tally = Tally()
        self._run: TaskRun | None = None  # of the current task, or the last one
        self._given_back: set[int] = set()  # leases returned before they were started

    def run(self) -> None:
        """Returns when no more tasks will come. Raises the same errors as `run_job`."""
        session = self._session
        for event in session.input:
            session.progress.raise_error()
            if isinstance(event, Finished):
                if event.error is not None:
                    raise event.error
                break
            try:
                self._take(event)
            except ConnectionLostError:
                raise
            except (Exception, SystemExit) as error:
                assert self._run is not None
                self._run.fail(error)
                if self._run.gave_up:
                    return
            if session.input.leaving and self._may_leave(event):
                self._put_down()
        session.rest()
        session.passes.end()
        self._end_predictions()

    def _take(self, event: Event) -> None:
        remove_generated_files()  # before the last task's report, after which the job may be over
        if self._session.progress.splits:
            self._agree_to_splits()
        if isinstance(event, TaskStarted):
            self._session.heard_of(event.epoch, event.task.peers)
            self._run = TaskRun(self._session, self._tally, event)
            try:
                self._begin(self._run)
            finally:
                event.begun.set()
            return
        run = self._run
        if isinstance(event, Idle):
            self._session.heard_of(event.epoch)
            self._session.rest(tells_again=True)
        if run is None or run.is_left:
            return
        if isinstance(event, Batch):
            run.run(event)
            if self._session.ends_training and run.task.type == pb.TRAINING:
                self._keep(run, run.units_begun)
            run.end_early()
        elif isinstance(event, TaskRead):
            if event.error is not None:
                raise event.error
            run.finish(event.exhausted, event.bad)

    def _begin(self, run: TaskRun) -> None:
        if run.task.lease in self._given_back:
            self._given_back.remove(run.task.lease)
            run.is_left = True
        elif self._session.ends_training and run.task.type == pb.TRAINING:
            self._keep(run, 0)
            self._session.give_back_callbacks()
        else:
            run.begin()

    def _may_leave(self, event: Event) -> bool:
        """The hooks of TRAIN_END run only once, so they must finish."""
        return self._run is None or self._run.task.type != pb.TRAIN_END or isinstance(event, TaskRead)

    def _put_down(self) -> None:
        """Reports all finished work; the rest of the current task is requeued."""
        logger.info("Stop requested: the rest of the current task is requeued")
        if self._run is not None:
            self._run.settle()
        self._session.heard_of(_LAST_EPOCH)
        self._session.rest(tells_again=True)
        if self._tally.predicts:
            self._end_predictions()
            if self._run is not None:
                self._run.send_predicted()
        self._session.progress.flush()
        self._session.progress.send()
        raise LeaveRequestedError

    def _end_predictions(self) -> None:
        """Lets callbacks store this worker's predictions that they hold in memory."""
        if self._tally.predicts:
            self._session.call("on_predict_end", {})
            self._session.give_back_callbacks()

    def _agree_to_splits(self) -> None:
        """Hands unstarted work of this worker's tasks to waiting workers."""
        session = self._session
        while session.progress.splits and not session.input.leaving:
            lease, end = session.progress.splits.popitem()
            run = self._run
            if run is not None and (lease != run.task.lease or run.is_left):
                run = None  # of a task that has not started
            pipeline = session.pipeline(Mode.TRAINING)
            exact = not pipeline.ends_by_itself and (pipeline.keeps_order or run is None)
            if not exact or not session.input.holds(lease):
                continue
            if run is None:
                session.client.split_task(lease, 0)
                self._given_back.add(lease)
                session.input.release(lease)
                continue
            end = max(end, run.units_begun)
            if run.end is not None and end >= run.end:
                continue
            self._keep(run, end)

    def _keep(self, run: TaskRun, end: int) -> None:
        """Does only the first `end` records of a task."""
        if self._session.client.split_task(run.task.lease, end).accepted and end:
            run.end = end
            run.end_early()
        else:
            run.leave()
