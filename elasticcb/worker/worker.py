"""Takes tasks, has their batches run, and leaves to others what it is asked to."""

from __future__ import annotations

import logging

from elasticcb.clients.master import MasterClient
from elasticcb.errors import ConnectionLostError, LeaveRequestedError
from elasticcb.model.spec import Spec
from elasticcb.process.generated_files import remove_generated_files
from elasticcb.process.signals import on_sigterm
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import JobSettings, Mode
from elasticcb.worker.session import BuiltModel, Session
from elasticcb.worker.task_input import Batch, Event, Finished, TaskRead, TaskStarted
from elasticcb.worker.task_progress import Tally
from elasticcb.worker.task_run import TaskRun

logger = logging.getLogger(__name__)


class Worker:
    """One worker of a job.

    Args:
        settings: of the job.
        client: of the master; the worker registers with it once its model is built.
        index: the place to take; -1 lets the master choose.
        spec: brings model, callbacks and, for a program, the data.
    """

    def __init__(self, settings: JobSettings, client: MasterClient, index: int, spec: Spec) -> None:
        self._settings, self._client, self._index, self._spec = settings, client, index, spec

    def run(self) -> None:
        """Works until the master says that nothing will come any more.

        Raises:
            ConnectionLostError: the master or a server is out of reach.
            LeaveRequestedError: SIGTERM came, or the master needs fewer workers.
            ElasticCBError: the model file, or the cluster, is not usable.
        """
        built = BuiltModel(self._settings, self._client, self._spec)
        self._client.register(pb.WORKER, self._index)
        session = Session(built, self._client.wait_for_cluster())
        try:
            with on_sigterm(session.input.leave):
                TaskLoop(session).run()
        finally:
            session.close()


class TaskLoop:
    """Runs the tasks of a session, one after another.

    Args:
        session: of the worker.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tally = Tally()
        self._run: TaskRun | None = None  # of the present task, or the last one
        self._given_back: set[int] = set()  # leases, before they were begun with

    def run(self) -> None:
        """Returns when no task will come any more. Raises as `Worker.run`."""
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
        session.passes.end()
        self._end_predictions()

    def _take(self, event: Event) -> None:
        remove_generated_files()  # an event of the last task before its report, after which the job may be over
        if self._session.progress.splits:
            self._agree_to_splits()
        if isinstance(event, TaskStarted):
            self._run = TaskRun(self._session, self._tally, event)
            if event.task.lease in self._given_back:
                self._given_back.remove(event.task.lease)
                self._run.is_left = True
            else:
                self._run.begin()
            return
        run = self._run
        if run is None or run.is_left:
            return
        if isinstance(event, Batch):
            run.run(event)
            run.end_early()
        elif isinstance(event, TaskRead):
            if event.error is not None:
                raise event.error
            run.finish(event.exhausted)

    def _may_leave(self, event: Event) -> bool:
        """The hooks of TRAIN_END run once, and so to their end."""
        return self._run is None or self._run.task.type != pb.TRAIN_END or isinstance(event, TaskRead)

    def _put_down(self) -> None:
        """Tells the master all that is done; the rest of the present task goes to others."""
        logger.info("Asked to end: the rest of the present task goes back")
        if self._run is not None:
            self._run.settle()
        if self._tally.predicts:
            self._end_predictions()
            if self._run is not None:
                self._run.send_predicted()
        self._session.progress.flush()
        self._session.progress.send()
        raise LeaveRequestedError

    def _end_predictions(self) -> None:
        """Lets callbacks put down what they hold of this worker's predictions."""
        if self._tally.predicts:
            self._session.call("on_predict_end", {})

    def _agree_to_splits(self) -> None:
        """Leaves to others that wait what is not begun of this worker's tasks."""
        session = self._session
        while session.progress.splits and not session.input.leaving:
            lease, end = session.progress.splits.popitem()
            run = self._run
            if run is not None and (lease != run.task.lease or run.is_left):
                run = None  # it is of a task that has not begun
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
            if session.client.split_task(lease, end).accepted and end:
                run.end = end
                run.end_early()
            else:
                run.leave()
