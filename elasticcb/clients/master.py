"""The client of the master, for workers and parameter servers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elasticcb.errors import ConnectionLostError, ElasticCBError, UsageError
from elasticcb.process.host import host_name
from elasticcb.process.stats import Measures
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import MASTER_METHODS, NEXT_BATCH
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import OPEN, Access
from elasticcb.settings import JobSettings
from elasticcb.sharding.partition import Places, ServerPlace, ShardMap

logger = logging.getLogger(__name__)

_LONG_POLL_SECONDS = 60.0  # the master answers much earlier
_COUNTING_SECONDS = 600.0  # for the servers to count rows of large tables
_BATCH_SECONDS = 86_400.0  # for user code to create a batch; the loss of the master is detected earlier


class MasterClient:
    """Calls to the master, by one process.

    Args:
        patience_seconds: how long it may be unreachable, because a killed master is replaced.

    Attributes:
        lost_workers: ids of workers declared lost, as of the last call of `jobs`. Updated in place.
        newest_server: id of the newest parameter server in use; the replacement of a lost server has a higher one.
        measures: statistics of this process; they are sent to the master with other calls.

    Every call raises `ConnectionLostError` when the master stays unreachable.
    """

    def __init__(self, address: str, patience_seconds: float = 60.0, access: Access = OPEN) -> None:
        self._connection = Connection(address, "the master", patience_seconds, access)
        self.access = access
        self.id = 0  # 0 until registered
        self.job = 0  # number of the current job, from 1
        self.lost_workers: set[int] = set()
        self.newest_server = 0
        self.measures = Measures()
        self.measures.certificate_expires = access.certificate_expires

    def jobs(self) -> Iterator[JobSettings]:
        """The settings of each job when it begins; ends when no more jobs will come.

        Requesting the next job means that this process has finished the last one.
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
        """Raises `JobOverError` for errors that occur before joining a job that has ended meanwhile.

        The files of such a job may be gone.
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
        """The current job's serialized job, if it has no model file (elasticcb/model/program.py).

        Args:
            dataset: number of a per-worker dataset: returns the function that creates it instead.
        """
        request = pb.GetProgramRequest(job=self.job, dataset=dataset)
        return bytes(self._call("GetProgram", request).program)

    def index_of(self, mode: str, file: str) -> bytes:
        """Byte offsets of the records of a data file; b"" if the master does not know them (yet)."""
        request = pb.GetIndexRequest(job=self.job, mode=mode, file=file)
        return bytes(self._call("GetIndex", request).index)

    def next_batch(self, request: pb.NextBatchRequest) -> Frame[pb.NextBatchResponse]:
        """Requests a batch of data without an index (elasticcb/data/batch_sources/service.py)."""
        answer: Frame[pb.NextBatchResponse] = self._connection.call(NEXT_BATCH, Frame(request, {}), _BATCH_SECONDS)
        return answer

    def register(self, role: pb.Role, index: int, address: str = "") -> int:
        """Joins the current job, ready to serve or to work; returns the assigned index."""
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
            unreachable: id of a server that does not answer this process.
            map_version: minimum version of the shard map by which they hold the model.
        """
        while True:
            request = pb.GetClusterRequest(id=self.id, unreachable=unreachable, map_version=map_version)
            answer = self._call("GetCluster", request, _LONG_POLL_SECONDS)
            if answer.ready:
                self.newest_server = max(answer.ps_ids, default=0)
                return answer

    def find_server(self, index: int, unreachable: int) -> tuple[str, int]:
        """Current address and id of the parameter server with an index; waits while a lost one is replaced. "" and 0
        when there are fewer servers now.
        """
        cluster = self.wait_for_cluster(unreachable)
        if index >= len(cluster.ps_ids):
            return "", 0
        return cluster.ps_addresses[index], cluster.ps_ids[index]

    def find_map(self, version: int) -> Places:
        """The parameter servers of a shard map of at least this version."""
        return places_of(self.wait_for_cluster(map_version=version))

    def get_task(self, leases: Iterable[int], at_once: bool = False) -> Any:
        """The `GetTaskResponse`; when there is nothing to do, at once or after a while."""
        request = pb.GetTaskRequest(worker_id=self.id, leases=leases, at_once=at_once)
        return self._call("GetTask", request, _LONG_POLL_SECONDS)

    def report_progress(self, progress: pb.ReportProgressRequest) -> Any:
        progress.worker_id = self.id
        progress.stats.CopyFrom(self.measures.to_message())
        answer = self._call("ReportProgress", progress)
        self.newest_server = max(self.newest_server, answer.servers)
        return answer

    def split_task(self, lease: int, end: int) -> Any:
        """This worker will only process the first `end` records of the leased shard."""
        request = pb.SplitTaskRequest(worker_id=self.id, split=pb.Split(lease=lease, end=end))
        return self._call("SplitTask", request)

    def report_done(self, report: pb.ReportTaskRequest) -> Any:
        report.worker_id, report.succeeded = self.id, True
        return self._call("ReportTask", report)

    def report_failed(self, lease: int, error: str, traceback: str, fatal: bool) -> Any:
        request = pb.ReportTaskRequest(worker_id=self.id, lease=lease, error=error, traceback=traceback, fatal=fatal)
        return self._call("ReportTask", request)

    def share_callbacks(self, known: int, state: bytes = b"", learning_rate: float | None = None) -> Any:
        """Fetches the state of callbacks; or gives `state` back (worker/pass_hooks.py), and the learning rate
        that they have set."""
        request = pb.ShareCallbacksRequest(worker_id=self.id, known=known, state=state, learning_rate=learning_rate)
        return self._call("ShareCallbacks", request)

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
        saved: pb.SaveResponse | None = None,
    ) -> None:
        """Deregisters this process.

        Args:
            fatal: the error would also occur in a replacement.
            saved: what this server has saved after its last answer.
        """
        request = pb.LeaveRequest(
            id=self.id, error=error, traceback=traceback, fatal=fatal, role=role, index=index, asked=asked, saved=saved
        )
        self._call("Leave", request, deadline_seconds=5.0, patience_seconds=1.0)

    def warn(self, subject: str, text: str) -> None:
        """Shows the user a warning, once per `subject`, if the master can be reached now."""
        logger.warning("%s", text)
        warning = pb.CallbackWarning(subject=subject, text=text)
        request = pb.ReportProgressRequest(worker_id=self.id, warnings=[warning])
        with contextlib.suppress(ElasticCBError):
            self._call("ReportProgress", request, deadline_seconds=5.0, patience_seconds=1.0)

    def scale(self, workers: int) -> int:
        """Changes the number of workers; returns the previous number."""
        return int(self._call("Scale", pb.ScaleRequest(workers=workers)).before)

    def scale_servers(self, servers: int, on_wait: Callable[[str], None]) -> str:
        """Changes the number of parameter servers, and waits until they hold the model; returns a message, "" if
        nothing changed.

        Raises `UsageError` when the change is not possible.
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
        """Stops the job like Ctrl-C; returns the process id and host name of the master.

        Raises `UsageError` when the job can't be stopped this way.
        """
        answer = self._call("Stop", pb.StopRequest())
        return answer.pid, answer.host

    def status(self) -> dict[str, Any]:
        """The job's state, as shown by `elasticcb status --json`."""
        document: dict[str, Any] = json.loads(self._call("Status", pb.StatusRequest()).status)
        return document

    def status_and_past(self, after: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state, and the history after entry number `after`, as in `History.after`."""
        answer = self._call("Status", pb.StatusRequest(past_after=after))
        return json.loads(answer.status), json.loads(answer.past)

    def tables(self, top: int, id: int | None = None) -> pb.TablesResponse:
        """Statistics of the embedding tables, with the `top` most frequently looked-up ids; or the rows of `id`.

        Raises `UsageError` when that is not possible now.
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
    """The parameter servers of a `GetClusterResponse`."""
    places = tuple(map(ServerPlace, cluster.ps_addresses, cluster.ps_ids))
    return Places(places, ShardMap(len(places), cluster.map_version))
