"""Broken messages to a real master."""

import random
from collections import Counter

import grpc
import pytest
from fuzzing import ALLOWED, change_one_value

from elasticcb.cluster.external import ExternalCluster
from elasticcb.master.master import Master
from elasticcb.master.task_queue import TaskQueue
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import Connection
from elasticcb.settings import ClusterSettings, Command, JobSettings, ModelSettings

WAITING = {"GetSettings", "GetCluster", "GetTask"}  # long polls
_TENSOR = pb.Tensor(dtype="float32", shape=[2], content=b"\0" * 8, name="x")


@pytest.fixture
def master():
    settings = JobSettings(
        command=Command.TRAIN,
        name="job",
        directory="/nowhere",
        model=ModelSettings(zoo="/nowhere", definition="model.custom_model"),
        cluster=ClusterSettings(num_workers=4, num_ps=1),
    )
    master = Master(settings.cluster, ExternalCluster(lambda line: None), lambda line: None)
    master.start()
    master.begin_job(settings)
    yield master
    master.stop()


def message_to(method: str, generator: random.Random, job: int) -> object:
    """A call as a worker could make it."""
    worker, lease = generator.randrange(1, 6), generator.randrange(12)
    metrics = [pb.MetricState(name="loss", variables=[_TENSOR, _TENSOR])]
    event = pb.BatchEvent(type=pb.TRAINING, version=3, size=8, logs={"loss": 1.0})
    return {
        "GetSettings": pb.GetSettingsRequest(id=worker),
        "GetProgram": pb.GetProgramRequest(job=job),
        "Register": pb.RegisterRequest(role=pb.WORKER, index=-1, pid=worker, host="here", job=job),
        "GetCluster": pb.GetClusterRequest(id=worker),
        "GetTask": pb.GetTaskRequest(worker_id=worker, leases=[lease]),
        "ReportProgress": pb.ReportProgressRequest(
            worker_id=worker, lease=lease, records_done=2, version=3, loss=1.0, batches=1, batch_events=[event]
        ),
        "ReportTask": pb.ReportTaskRequest(worker_id=worker, lease=lease, succeeded=True, version=3, metrics=metrics),
        "StopTraining": pb.StopTrainingRequest(worker_id=worker, reason="enough"),
        "Leave": pb.LeaveRequest(id=worker, asked=generator.random() < 0.5),
        "Scale": pb.ScaleRequest(workers=3),
    }[method]


def test_broken_messages_are_refused_in_words_and_the_master_goes_on(master):
    generator = random.Random(0)
    connection = Connection(master.address, "the master")
    methods = ["GetSettings", "GetProgram", "GetCluster", "StopTraining", "Leave", "Scale"]
    methods += 4 * ["Register", "GetTask", "ReportProgress", "ReportTask"]
    codes, surprises = Counter(), set()
    for number in range(3_000):
        if number % 100 == 0:  # most jobs do not live long here
            master.begin_job(master.settings)
            master.queue = TaskQueue(training=[("a", 400)], records_per_task=20, minibatch_size=10, lease_seconds=60.0)
        method = generator.choice(methods)
        message = message_to(method, generator, master.job)
        if generator.random() < 0.6:
            change_one_value(message, generator)
        data = bytearray(message.SerializeToString())
        if data and generator.random() < 0.2:
            data[generator.randrange(len(data))] = generator.randrange(256)
        send = connection.channel.unary_unary(f"/elasticcb.Master/{method}")
        try:
            send(bytes(data), timeout=0.05 if method in WAITING else 30.0, metadata=connection.metadata)
            code, words = grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            code, words = error.code(), error.details()
        codes[code] += 1
        unread = code is grpc.StatusCode.INTERNAL and words == "Exception deserializing request!"
        waited = code is grpc.StatusCode.DEADLINE_EXCEEDED and method in WAITING
        if not (code in ALLOWED or unread or waited):
            surprises.add((method, code.name, words))
    connection.close()
    assert not surprises
    assert codes[grpc.StatusCode.OK] > 500
    assert codes[grpc.StatusCode.FAILED_PRECONDITION] > 50
