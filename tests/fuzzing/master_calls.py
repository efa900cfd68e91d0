"""Broken calls to a master, and to the service of batches at its port."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator

import grpc
import numpy as np

from elasticcb.cluster.external import ExternalCluster
from elasticcb.data.batch_sources.service import DataService
from elasticcb.master.master import Master
from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import NEXT_BATCH
from elasticcb.rpc.tensors import Frame, encode_frame
from elasticcb.security.credentials import OPEN, Access
from elasticcb.settings import ClusterSettings, Command, JobSettings, ModelSettings
from mutations import ALLOWED, change_one_value, changed_bytes, changed_frame

_WAITING = {"GetSettings", "GetCluster", "GetTask", "Scale", "Tables"}  # long polls
_TENSOR = pb.Tensor(dtype="float32", shape=[2], content=b"\0" * 8, name="x")


@contextlib.contextmanager
def serving(host: str = "", access: Access = OPEN, data: DataService | None = None) -> Iterator[Master]:
    """A master without a job, which serves `data`, too."""
    cluster = ClusterSettings(num_workers=4, num_ps=1, health_port=0, host=host)
    master = Master(cluster, ExternalCluster(lambda line: None), lambda line: None, access)
    if data is not None:
        master.add(data.frames())
    master.start()
    try:
        yield master
    finally:
        master.stop()


def begin_job(master: Master) -> None:
    """Most jobs do not live long here."""
    settings = JobSettings(
        command=Command.TRAIN,
        name="job",
        directory="/nowhere",
        model=ModelSettings(zoo="/nowhere", definition="model.custom_model"),
        cluster=ClusterSettings(num_workers=4, num_ps=1),
    )
    master.server.begin_job(settings)
    with master.server.state() as state:
        state.queue = TaskQueue(
            QueueSettings(records_per_task=20, minibatch_size=10, lease_seconds=60.0), training=[("a", 400)]
        )


class MasterFuzzer:
    """Sends broken calls to the master at an address.

    Attributes:
        codes: how often each status was the answer.
        surprises: calls that were answered by a status that is not `ALLOWED`: (method, status, words).
    """

    def __init__(self, seed: int, address: str, access: Access = OPEN) -> None:
        self._random = random.Random(seed)
        self._connection = Connection(address, "the master", access=access)
        self._job = 0
        self.codes: Counter[str] = Counter()
        self.surprises: set[tuple[str, str, str]] = set()

    def run(self, messages: int) -> None:
        """Sends so many, in the job that there is."""
        self._job = self._present_job()
        last = self.codes.total() + messages
        while self.codes.total() < last:
            message, often = self._random.choice(self._valid())
            if self._random.random() < often:
                self._send(message)

    def _present_job(self) -> int:
        stub = self._connection.channel.unary_unary("/elasticcb.Master/GetSettings")
        answer = stub(pb.GetSettingsRequest().SerializeToString(), timeout=30.0, metadata=self._connection.metadata)
        return int(pb.GetSettingsResponse.FromString(answer).job)

    def _send(self, message: object) -> None:
        if self._random.random() < 0.6:
            change_one_value(message, self._random)
        data = message.SerializeToString()
        if data and self._random.random() < 0.2:
            data = changed_bytes(data, self._random)
        method = type(message).__name__.removesuffix("Request")
        call = self._connection.channel.unary_unary(f"/elasticcb.Master/{method}")
        try:
            call(data, timeout=0.05 if method in _WAITING else 30.0, metadata=self._connection.metadata)
            code, words = grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            code, words = error.code(), error.details()
        self.codes[code.name] += 1
        waited = code is grpc.StatusCode.DEADLINE_EXCEEDED and method in _WAITING
        if not (code in ALLOWED or waited):
            self.surprises.add((method, code.name, words.split("\n")[0][:200]))

    def _valid(self) -> list[tuple[object, float]]:
        """Calls as a worker could make them, and how often of those drawn they are made."""
        worker, lease = self._random.randrange(1, 6), self._random.randrange(12)
        metrics = [pb.MetricState(name="loss", variables=[_TENSOR, _TENSOR])]
        event = pb.BatchEvent(type=pb.TRAINING, version=3, size=8, logs={"loss": 1.0})
        progress = pb.ReportProgressRequest(
            worker_id=worker,
            lease=lease,
            records_done=2,
            version=3,
            loss=1.0,
            batches=1,
            batch_seconds=0.5,
            timed_batches=1,
            batch_events=[event],
        )
        split = pb.Split(lease=lease, end=10 * (lease % 3))
        return [
            (pb.GetSettingsRequest(id=worker), 0.2),
            (pb.TablesRequest(top=2), 0.2),
            (pb.TablesRequest(id=7), 0.2),
            (pb.GetProgramRequest(job=self._job), 0.2),
            (pb.GetIndexRequest(job=self._job, mode="training", file="data"), 0.2),
            (pb.RegisterRequest(role=pb.WORKER, index=-1, pid=worker, host="here", job=self._job), 1.0),
            (pb.RegisterRequest(role=pb.PS, index=0, pid=worker, host="here", job=self._job), 0.1),
            (pb.GetClusterRequest(id=worker), 0.2),
            (pb.GetTaskRequest(worker_id=worker, leases=[lease]), 1.0),
            (progress, 1.0),
            (pb.SplitTaskRequest(worker_id=worker, split=split), 1.0),
            (pb.ReportTaskRequest(worker_id=worker, lease=lease, succeeded=True, version=3, metrics=metrics), 1.0),
            (pb.StopTrainingRequest(worker_id=worker, reason="enough"), 0.2),
            (pb.LeaveRequest(id=worker, asked=self._random.random() < 0.5), 0.2),
            (pb.StatusRequest(), 0.2),
            (pb.ScaleRequest(workers=3), 0.1),
            (pb.ScaleRequest(servers=2), 0.1),
        ]

    def still_serves(self) -> bool:
        """Whether it answers a call as it should be."""
        return self._present_job() > 0

    def close(self) -> None:
        self._connection.close()


def endless_batches(data: DataService) -> int:
    """Has `data` serve them; under which number."""
    passes = (itertools.repeat([np.zeros((4, 3), np.float32)]) for _ in itertools.count())
    return data.register(passes, lambda batch: batch, None, by_epoch=True)


class BatchesFuzzer:
    """Sends broken calls for the batches that a process of the caller serves at the master's port.

    Args:
        source: the number of `endless_batches`.

    Attributes:
        codes, surprises: as those of `MasterFuzzer`.
    """

    def __init__(self, seed: int, address: str, source: int, access: Access = OPEN) -> None:
        self._random = random.Random(seed)
        self._connection = Connection(address, "the master", access=access)
        self._source, self._number = source, 0
        self.codes: Counter[str] = Counter()
        self.surprises: set[tuple[str, str, str]] = set()

    def run(self, messages: int) -> None:
        for _ in range(messages):
            self._number += 1
            frame = self._request()
            broken = self._random.random() < 0.8
            data = changed_frame(frame, pb.NextBatchRequest, self._random) if broken else encode_frame(frame)
            call = self._connection.channel.unary_unary(NEXT_BATCH.path)
            try:
                call(data, timeout=30.0, metadata=self._connection.metadata)
                code, words = grpc.StatusCode.OK, ""
            except grpc.RpcError as error:
                code, words = error.code(), error.details()
            self.codes[code.name] += 1
            if code not in ALLOWED or (code is not grpc.StatusCode.OK and not words):
                self.surprises.add(("Next", code.name, words.split("\n")[0][:200]))

    def _request(self) -> Frame[pb.NextBatchRequest]:
        header = pb.NextBatchRequest(source=self._source, epoch=0, reader=1, number=self._number)
        return Frame(header, {"x": np.zeros(3, np.float32)} if self._random.random() < 0.3 else {})

    def still_serves(self) -> bool:
        """Whether a new reader gets a batch."""
        header = pb.NextBatchRequest(source=self._source, epoch=0, reader=2**60, number=0)
        return len(self._connection.call(NEXT_BATCH, Frame(header, {})).header.arrays) > 0

    def close(self) -> None:
        self._connection.close()
