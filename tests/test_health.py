"""The standard gRPC health service of a real master and a real parameter server, as a probe without a token sees it."""

import socket

import grpc
import pytest
from health_probe import NOT_SERVING, SERVING, check
from ps_clients import TrainingControl

from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import UsageError
from elasticcb.master.master import Master
from elasticcb.master.members import ServedCluster
from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue
from elasticcb.optimizers.state import ModelState
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.server import PSServer
from elasticcb.rpc.server import HealthServer
from elasticcb.security.credentials import Access
from elasticcb.settings import ClusterSettings, Command, JobSettings
from elasticcb.sharding.partition import VariableSpec

SETTINGS = JobSettings(command=Command.EVALUATE, name="test", directory="")


def test_a_master_lives_at_once_and_is_ready_when_it_hands_out_tasks():
    lines = []
    master = Master(ClusterSettings(health_port=0), ExternalCluster(lines.append), lines.append, Access("secret"))
    try:
        address = master.health_address
        assert lines == [f"Health checks are answered at {address}."]
        master.start()
        master.server.begin_job(SETTINGS)
        assert check(address, "") == SERVING
        assert check(address, "elasticcb.Master") == NOT_SERVING
        with master.server.state() as state:
            state.queue = TaskQueue(QueueSettings(records_per_task=10, minibatch_size=5), training=[("a", 10)])
        assert check(address, "elasticcb.Master") == NOT_SERVING
        with master.server.state() as state:
            state.cluster = ServedCluster([], [], False)
        with master.server.state():  # while it is busy
            assert check(address, "elasticcb.Master") == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(address, "elasticcb.ParameterServer")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        master.stop()


def test_a_parameter_server_is_ready_when_it_holds_its_part_of_the_model():
    server = PSServer(SETTINGS, None, access=Access("secret"))
    server.start()
    health = HealthServer("127.0.0.1", 0, "elasticcb.ParameterServer", lambda: server.ready)
    control = TrainingControl(
        [server.address], [VariableSpec("bias", (2,), "float32", True)], False, access=Access("secret")
    )
    try:
        assert check(health.address, "") == SERVING
        assert check(health.address, "elasticcb.ParameterServer") == NOT_SERVING
        control.initialize(ModelState([[1.0, 2.0]]))
        assert check(health.address, "elasticcb.ParameterServer") == SERVING
    finally:
        control.close()
        health.stop()
        server.stop()


def test_a_probe_reaches_nothing_else_and_sends_no_broken_or_large_message():
    health = HealthServer("127.0.0.1", 0, "elasticcb.Master", lambda: True)
    try:
        with grpc.insecure_channel(health.address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/elasticcb.Master/GetTask")(pb.GetTaskRequest().SerializeToString(), timeout=60.0)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            for broken, code in ((b"\xff", "INVALID_ARGUMENT"), (bytes(100_000), "RESOURCE_EXHAUSTED")):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary("/grpc.health.v1.Health/Check")(broken, timeout=60.0)
                assert caught.value.code().name == code
    finally:
        health.stop()


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="Choose another health_port"):
            HealthServer("127.0.0.1", port, "elasticcb.Master", lambda: True)
