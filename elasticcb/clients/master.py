"""The side of workers and parameter servers in the conversation with the master."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elasticcb.clients.ps_places import Places, ServerPlace
from elasticcb.errors import ConnectionLostError, ElasticCBError, UsageError
from elasticcb.process.host import host_name
from elasticcb.process.stats import Measures
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import MASTER_METHODS, NEXT_BATCH
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import OPEN, Access
from elasticcb.settings import JobSettings
from elasticcb.sharding.bucket_map import BucketMap

logger = logging.getLogger(__name__)

_LONG_POLL_SECONDS = 60.0  # the master answers much earlier
_COUNTING_SECONDS = 600.0  # for the servers to count the rows of large tables
_BATCH_SECONDS = 86_400.0  # for the user's code to make a batch; that the master is gone is noticed earlier


class MasterClient:
    """Calls to the master, by one process.

    Args:
        address: of the master.
        patience_seconds: how long it may be away; another one may be on its way to take its place.
        access: to the job.

    Attributes:
        lost_workers: ids of workers that the master has given up, as far as `jobs` has heard. It grows in place.
        measures: what this process counts; the master hears of it by calls that are made anyway.

    Raises `ConnectionLostError` from any call when the master stays out of reach.
    """

    def __init__(self, address: str, patience_seconds: float = 60.0, access: Access = OPEN) -> None:
        self._connection = Connection(address, "the master", patience_seconds, access)
        self.access = access
        self.id = 0  # 0 until registered
        self.job = 0  # the present one; they count from 1
        self.lost_workers: set[int] = set()
        self.measures = Measures()
        self.measures.certificate_expires = access.certificate_expires

    def jobs(self) -> Iterator[JobSettings]:
        """The settings of one job after another, each when it begins; ends when no more will come.

        Whoever asks for the next job is done with the last one.
        """
        while True:
            request = pb.GetSettingsRequest(after_job=self.job, id=self.id, known_lost=len(self.lost_workers))
            if self.id:
                request.stats.CopyFrom(self.measures.to_message())
            answer = self._call("GetSettings", request, _LONG_POLL_SECONDS)
            self.lost_workers.update(answer.lost_workers)
            if answer.over:
                return
            if answer.job:
                self.job = answer.job
                yield JobSettings.from_json(answer.settings)

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Raises `JobOverError` for what fails before this process has joined a job that is over meanwhile.

        Such a job's files may be gone.
        """
        try:
            yield
        except ConnectionLostError:
            raise
        except Exception:
            if not self.id:
                self.index_of("", "")
            raise

    def program(self, dataset: int = 0) -> bytes:
        """What the present job runs, if it has no model file (elasticcb/model/program.py).

        Args:
            dataset: the number of a per-worker dataset: what makes it, instead.
        """
        request = pb.GetProgramRequest(job=self.job, dataset=dataset)
        return bytes(self._call("GetProgram", request).program)

    def index_of(self, mode: str, file: str) -> bytes:
        """Where records of a file of the job's data begin; b"" when the master does not know that, or not yet."""
        request = pb.GetIndexRequest(job=self.job, mode=mode, file=file)
        return bytes(self._call("GetIndex", request).index)

    def next_batch(self, request: pb.NextBatchRequest) -> Frame[pb.NextBatchResponse]:
        """Asks for a batch of data without an index (elasticcb/data/batch_sources/service.py)."""
        answer: Frame[pb.NextBatchResponse] = self._connection.call(NEXT_BATCH, Frame(request, {}), _BATCH_SECONDS)
        return answer

    def register(self, role: pb.Role, index: int, address: str = "") -> int:
        """Joins the present job, ready to serve or to work; returns the place taken."""
        request = pb.RegisterRequest(
            role=role,
            index=index,
            address=address,
            pid=os.getpid(),
            host=host_name(),
            id=self.id,
            job=self.job,
        )
        answer = self._call("Register", request)
        self.id = answer.id
        return int(answer.index)

    def wait_for_cluster(self, unreachable: int = 0, map_version: int = 0) -> Any:
        """Waits until all parameter servers hold the model; returns the `GetClusterResponse`.

        Args:
            unreachable: the id of a server that does not answer here.
            map_version: of the map by which they hold it, at least.
        """
        while True:
            request = pb.GetClusterRequest(id=self.id, unreachable=unreachable, map_version=map_version)
            answer = self._call("GetCluster", request, _LONG_POLL_SECONDS)
            if answer.ready:
                return answer

    def find_server(self, index: int, unreachable: int) -> tuple[str, int]:
        """Where the parameter server in a place is now, and its id; waits while a lost one is replaced. "" and 0 when
        there are fewer places by now.

        Args:
            unreachable: the id of the one that does not answer.
        """
        cluster = self.wait_for_cluster(unreachable)
        if index >= len(cluster.ps_ids):
            return "", 0
        return cluster.ps_addresses[index], cluster.ps_ids[index]

    def find_map(self, version: int) -> Places:
        """The parameter servers by a map of at least this version."""
        return places_of(self.wait_for_cluster(map_version=version))

    def get_task(self, leases: Iterable[int]) -> Any:
        """The `GetTaskResponse`; waits for some time when there is nothing to do."""
        request = pb.GetTaskRequest(worker_id=self.id, leases=leases)
        return self._call("GetTask", request, _LONG_POLL_SECONDS)

    def report_progress(self, progress: pb.ReportProgressRequest) -> Any:
        progress.worker_id = self.id
        progress.stats.CopyFrom(self.measures.to_message())
        return self._call("ReportProgress", progress)

    def split_task(self, lease: int, end: int) -> Any:
        """This worker will do the first `end` records of the leased shard, and no more."""
        request = pb.SplitTaskRequest(worker_id=self.id, split=pb.Split(lease=lease, end=end))
        return self._call("SplitTask", request)

    def report_done(self, report: pb.ReportTaskRequest) -> Any:
        report.worker_id, report.succeeded = self.id, True
        return self._call("ReportTask", report)

    def report_failed(self, lease: int, error: str, traceback: str, fatal: bool) -> Any:
        request = pb.ReportTaskRequest(worker_id=self.id, lease=lease, error=error, traceback=traceback, fatal=fatal)
        return self._call("ReportTask", request)

    def stop_training(self, reason: str) -> None:
        self._call("StopTraining", pb.StopTrainingRequest(worker_id=self.id, reason=reason))

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
        self._call("Leave", request, deadline_seconds=5.0, patience_seconds=1.0)

    def warn(self, subject: str, text: str) -> None:
        """Shows the user something, once for each `subject`, if the master can be reached now."""
        logger.warning("%s", text)
        warning = pb.CallbackWarning(subject=subject, text=text)
        request = pb.ReportProgressRequest(worker_id=self.id, warnings=[warning])
        with contextlib.suppress(ElasticCBError):
            self._call("ReportProgress", request, deadline_seconds=5.0, patience_seconds=1.0)

    def scale(self, workers: int) -> int:
        """Asks for another number of workers; answers how many there were to be."""
        return int(self._call("Scale", pb.ScaleRequest(workers=workers)).before)

    def scale_servers(self, servers: int, on_wait: Callable[[str], None]) -> str:
        """Asks for another number of parameter servers, and waits until they hold the model; says what was done, ""
        when there were as many.

        Args:
            on_wait: is told what has to come before it, when that takes its time.

        Raises `UsageError` when it can't be done.
        """
        request = pb.ScaleRequest(servers=servers)
        told = ""
        while True:
            answer = self._call("Scale", request, _LONG_POLL_SECONDS)
            if answer.error:
                raise UsageError(answer.error)
            if answer.done:
                return str(answer.moved)
            if answer.waits_for not in ("", told):
                told = str(answer.waits_for)
                on_wait(told)
            request.waiting = True

    def stop(self) -> tuple[int, str]:
        """Asks for the end of the job, as Ctrl-C does; answers the master's process id, and its machine's name.

        Raises `UsageError` when the job can't be ended so.
        """
        answer = self._call("Stop", pb.StopRequest())
        return answer.pid, answer.host

    def status(self) -> dict[str, Any]:
        """The job's state, as `elasticcb status --json` shows it."""
        document: dict[str, Any] = json.loads(self._call("Status", pb.StatusRequest()).status)
        return document

    def status_and_past(self, after: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """As `status`, and what has happened since the entry of that number, as `History.after` gives it."""
        answer = self._call("Status", pb.StatusRequest(past_after=after))
        return json.loads(answer.status), json.loads(answer.past)

    def tables(self, top: int, id: int | None = None) -> pb.TablesResponse:
        """What the embedding tables hold, with the `top` ids that were looked up most; or the rows of `id`.

        Raises `UsageError` when that can't be told now.
        """
        answer: pb.TablesResponse = self._call("Tables", pb.TablesRequest(top=top, id=id), _COUNTING_SECONDS)
        return answer

    def _call(
        self, method: str, request: Any, deadline_seconds: float = 60.0, patience_seconds: float | None = None
    ) -> Any:
        return self._connection.call(MASTER_METHODS[method], request, deadline_seconds, patience_seconds)

    def close(self) -> None:
        self._connection.close()


def places_of(cluster: Any) -> Places:
    """The parameter servers in a `GetClusterResponse`."""
    buckets = BucketMap.from_bytes(len(cluster.ps_ids), cluster.buckets, cluster.map_version)
    return Places(tuple(map(ServerPlace, cluster.ps_addresses, cluster.ps_ids)), buckets)
