"""The side of workers and parameter servers in the conversation with the master."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from elasticcb.errors import ElasticCBError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.proto.elasticcb_pb2_grpc import MasterStub
from elasticcb.rpc import Connection
from elasticcb.settings import JobSettings

logger = logging.getLogger(__name__)

_LONG_POLL_SECONDS = 60.0  # the master answers much earlier
_EVENTS_PER_REPORT = 2_000
_MAX_EVENTS = 100_000  # that wait to be sent


class MasterClient:
    """Calls to the master, by one process.

    Args:
        address: of the master.
        token: of the job.

    Raises `ConnectionLostError` from any call when the master stays out of reach.
    """

    def __init__(self, address: str, patience_seconds: float = 30.0, token: str = "") -> None:
        self._connection = Connection(address, "the master", patience_seconds, token)
        self._stub = MasterStub(self._connection.channel)
        self.token = token
        self.id = 0  # 0 until registered
        self.job = 0  # the present one; they count from 1

    def jobs(self) -> Iterator[JobSettings]:
        """The settings of one job after another, each when it begins; ends when no more will come.

        Whoever asks for the next job is done with the last one.
        """
        while True:
            request = pb.GetSettingsRequest(after_job=self.job, id=self.id)
            answer = self._connection.call(self._stub.GetSettings, request, _LONG_POLL_SECONDS)
            if answer.over:
                return
            if answer.job:
                self.job = answer.job
                yield JobSettings.from_json(answer.settings)

    def program(self, dataset: int = 0) -> bytes:
        """What the present job runs, if it has no model file (elasticcb/program.py).

        Args:
            dataset: the number of a per-worker dataset: what makes it, instead.
        """
        request = pb.GetProgramRequest(job=self.job, dataset=dataset)
        return bytes(self._connection.call(self._stub.GetProgram, request).program)

    def register(self, role: pb.Role, index: int, address: str = "") -> int:
        """Joins the present job, ready to serve or to work; returns the place taken."""
        request = pb.RegisterRequest(
            role=role,
            index=index,
            address=address,
            pid=os.getpid(),
            host=socket.gethostname(),
            id=self.id,
            job=self.job,
        )
        answer = self._connection.call(self._stub.Register, request)
        self.id = answer.id
        return int(answer.index)

    def wait_for_cluster(self) -> Any:
        """Waits until all parameter servers hold the model; returns the `GetClusterResponse`."""
        while True:
            answer = self._connection.call(self._stub.GetCluster, pb.GetClusterRequest(id=self.id), _LONG_POLL_SECONDS)
            if answer.ready:
                return answer

    def find_server(self, index: int) -> tuple[str, int]:
        """Where the parameter server in a place is now, and its id; waits while a lost one is replaced."""
        cluster = self.wait_for_cluster()
        return cluster.ps_addresses[index], cluster.ps_ids[index]

    def get_task(self, leases: Iterable[int]) -> Any:
        """The `GetTaskResponse`; waits for some time when there is nothing to do."""
        request = pb.GetTaskRequest(worker_id=self.id, leases=leases)
        return self._connection.call(self._stub.GetTask, request, _LONG_POLL_SECONDS)

    def report_progress(self, progress: pb.ReportProgressRequest) -> Any:
        progress.worker_id = self.id
        return self._connection.call(self._stub.ReportProgress, progress)

    def report_done(self, report: pb.ReportTaskRequest) -> Any:
        report.worker_id, report.succeeded = self.id, True
        return self._connection.call(self._stub.ReportTask, report)

    def report_failed(self, lease: int, error: str, traceback: str, fatal: bool) -> Any:
        request = pb.ReportTaskRequest(worker_id=self.id, lease=lease, error=error, traceback=traceback, fatal=fatal)
        return self._connection.call(self._stub.ReportTask, request)

    def stop_training(self, reason: str) -> None:
        self._connection.call(self._stub.StopTraining, pb.StopTrainingRequest(worker_id=self.id, reason=reason))

    def leave(
        self,
        role: pb.Role,
        index: int,
        error: str = "",
        traceback: str = "",
        fatal: bool = False,
        asked: bool = False,
    ) -> None:
        """Says goodbye.

        Args:
            fatal: with an error that another process in this place would end with too.
            asked: it was told to end, while the job goes on.
        """
        request = pb.LeaveRequest(
            id=self.id, error=error, traceback=traceback, fatal=fatal, role=role, index=index, asked=asked
        )
        self._connection.call(self._stub.Leave, request, deadline_seconds=5.0, patience_seconds=1.0)

    def scale(self, workers: int) -> int:
        """Asks for another number of workers; answers how many there were to be."""
        return int(self._connection.call(self._stub.Scale, pb.ScaleRequest(workers=workers)).before)

    def close(self) -> None:
        self._connection.close()


class ProgressReporter:
    """Tells the master at intervals how far the present task is; a sign of life between tasks.

    Args:
        interval_seconds: between reports.

    Attributes:
        on_leave: called when the master wants this worker to leave.
    """

    def __init__(self, client: MasterClient, interval_seconds: float = 0.5) -> None:
        self._client = client
        self._interval = interval_seconds
        self._lock = threading.Lock()  # of `_progress`
        self._sending = threading.Lock()  # one report at a time, so that they arrive in order
        self._progress = pb.ReportProgressRequest()
        self._events: list[pb.BatchEvent] = []  # not sent yet
        self._warnings: dict[str, pb.CallbackWarning] = {}  # likewise, by subject
        self._wake = threading.Event()
        self._stopped = False
        self.on_leave: Callable[[], None] = lambda: None
        self.lost_leases: set[int] = set()  # that the master took away, or that the job's end did
        self._error: Exception | None = None  # why reporting ended
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def update(
        self,
        lease: int,
        records_done: int,
        version: int,
        loss: float | None = None,
        urgent: bool = False,
        event: pb.BatchEvent | None = None,
    ) -> None:
        """Notes progress, to be sent with the next report; at once if `urgent`."""
        with self._lock:
            if event is not None:
                # Together with the version: the master takes it that all batches before it are told.
                if len(self._events) == _MAX_EVENTS:
                    logger.warning("The master is slow to take reports: callbacks there will miss batches")
                if len(self._events) <= _MAX_EVENTS:
                    self._events.append(event)
                urgent = urgent or len(self._events) == _EVENTS_PER_REPORT
            progress = self._progress
            progress.lease, progress.records_done, progress.version = lease, records_done, version
            progress.progressed = True
            if loss is not None and np.isfinite(loss):
                progress.loss = (progress.loss * progress.batches + loss) / (progress.batches + 1)
                progress.batches += 1
        if urgent:
            self._wake.set()

    def clear(self) -> None:
        """No task runs now. No report on the last one is under way any more when this returns."""
        self.update(0, 0, self._progress.version)
        with self._sending:
            pass

    def warn(self, subject: str, text: str, errors: int = 0) -> None:
        """Notes something that the user should see; `errors` of a subject add up until the next report."""
        with self._lock:
            warning = self._warnings.setdefault(subject, pb.CallbackWarning(subject=subject, text=text))
            warning.errors += errors

    def flush(self) -> None:
        """Sends all batch events and warnings that were noted."""
        while self._events or self._warnings:
            self.send()
        with self._sending:  # what the other thread may have taken is under way no more
            pass

    def send(self) -> None:
        """Sends what was noted, now."""
        with self._sending:
            with self._lock:
                progress = pb.ReportProgressRequest()
                progress.CopyFrom(self._progress)
                self._progress.loss, self._progress.batches, self._progress.progressed = 0.0, 0, False
                progress.batch_events.extend(self._events[:_EVENTS_PER_REPORT])
                del self._events[:_EVENTS_PER_REPORT]
                if self._events:  # the version would say that they are told
                    progress.version = progress.batch_events[-1].version
                progress.warnings.extend(self._warnings.values())
                self._warnings.clear()
            answer = self._client.report_progress(progress)
            if progress.lease and (answer.over or not answer.accepted):
                self.lost_leases.add(progress.lease)
            if answer.leave:
                self.on_leave()

    def raise_error(self) -> None:
        """Raises what ended the reporting, if something did: the master refuses this process, or is lost."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._interval)
            self._wake.clear()
            try:
                self.send()
            except Exception as error:
                self._error = error
                return

    def stop(self) -> None:
        """Ends the reporting; warnings of the last hooks are still sent."""
        self._stopped = True
        self._wake.set()
        self._thread.join()
        if self._warnings and self._error is None:
            with contextlib.suppress(ElasticCBError):
                self.send()
