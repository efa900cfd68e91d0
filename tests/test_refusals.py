"""Calls that real servers refuse: they are counted, told of now and then, and cost the others nothing."""

import contextlib
import threading
from dataclasses import replace

import grpc
import numpy as np
import pytest
from echo_server import ECHO, ask, echo, start_server
from ps_clients import TrainingControl

from elasticcb.cli.progress import summary_lines
from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import ReplacedError, WireError
from elasticcb.master.master import Master
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.server import PSServer
from elasticcb.rpc import admission
from elasticcb.rpc.admission import PROTOCOL
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.link import Message
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame, encode_frame
from elasticcb.security.credentials import Access
from elasticcb.settings import ClusterSettings, Command, JobSettings

RELEASE = ("elasticcb-protocol", str(PROTOCOL))
TOKEN = ("elasticcb-token", "secret")


class Echo:
    """A server that says what it hears, and a channel to it that carries nothing by itself."""

    def __init__(self, **options):
        self.answer = echo
        self.server = start_server(lambda frame: self.answer(frame), access=Access("secret"), **options)
        self.connection = Connection(self.server.address, "the echo server", 60.0, Access("secret"))
        self.send = self.connection.channel.unary_unary(ECHO.path)

    def refusal(self, data, *metadata):
        with pytest.raises(grpc.RpcError) as caught:
            self.send(data, metadata=metadata, timeout=60.0)
        return caught.value.code()

    def call(self, shared=False, **tensors):
        return ask(self.connection, 7, replace(ECHO, shared=shared), **tensors).header.version

    @property
    def counts(self):
        return self.server.refused.counts()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(**options):
            echo = Echo(**options)
            stack.callback(echo.server.stop)
            stack.callback(echo.connection.close)
            return echo

        yield start


def test_refused_calls_are_counted_by_reason(serve):
    server = serve()
    assert server.refusal(b"", ("elasticcb-token", "guess"), RELEASE) is grpc.StatusCode.UNAUTHENTICATED
    assert server.refusal(b"", RELEASE) is grpc.StatusCode.UNAUTHENTICATED
    assert server.refusal(b"", TOKEN) is grpc.StatusCode.FAILED_PRECONDITION
    assert server.refusal(b"nonsense", TOKEN, RELEASE) is grpc.StatusCode.INVALID_ARGUMENT
    assert server.call() == 7
    assert server.counts == {
        "without the job's token": 2,
        "of another release": 1,
        "malformed": 1,
    }


def test_a_message_that_is_too_large_is_an_error_of_its_sender(serve):
    server = serve(largest_message=1 << 20)
    with pytest.raises(WireError, match=r"refused a message: .*larger than max"):
        server.call(a=np.zeros(1 << 20))
    assert server.call() == 7


def test_malformed_messages_on_a_link_are_counted_too(serve):
    server = serve()
    assert server.call(shared=True) == 7
    link = server.connection.transport_of(ECHO).side.link
    if link is None:
        pytest.skip("no sockets between processes of one machine here")
    with pytest.raises(grpc.RpcError):
        link.call("Echo", Message(b"ECB1nonsense"), 30.0)
    assert server.counts == {"malformed": 1}


def test_a_flood_of_strangers_is_counted_and_a_process_of_the_job_is_served(serve, caplog):
    server = serve()
    threads, calls = 4, 500
    codes = []

    def flood():
        with grpc.insecure_channel(server.server.address) as channel:
            send = channel.unary_unary(ECHO.path)
            for _ in range(calls):
                try:
                    send(bytes(10_000), metadata=(("elasticcb-token", "guess"),), timeout=60.0)
                except grpc.RpcError as error:
                    codes.append(error.code())

    flooding = [threading.Thread(target=flood) for _ in range(threads)]
    for thread in flooding:
        thread.start()
    served = [server.call() for _ in range(20)]
    for thread in flooding:
        thread.join()
    assert served == [7] * 20
    assert codes == [grpc.StatusCode.UNAUTHENTICATED] * (threads * calls)
    assert server.counts == {"without the job's token": threads * calls}
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert 1 <= len(lines) < 100
    assert lines[0].startswith("Calls refused so far, without the job's token: 1; the last one came from ipv")
    assert not [line for line in lines if "guess" in line or "secret" in line]


def test_strangers_take_no_threads(serve):
    server = serve(threads=1)
    held, let_go = threading.Event(), threading.Event()
    echo_of, server.answer = server.answer, lambda frame: held.set() or (let_go.wait(60) and echo_of(frame))
    call = threading.Thread(target=server.call)
    call.start()
    assert held.wait(60)
    assert server.refusal(b"", RELEASE) is grpc.StatusCode.UNAUTHENTICATED  # while the only thread is busy
    let_go.set()
    call.join()


def test_calls_that_wait_for_nothing_are_answered_while_all_threads_are_busy(monkeypatch):
    ps = PSServer(SETTINGS, None)
    ps.start()
    connection = Connection(ps.address, "the server", 60.0)
    control = TrainingControl([ps.address], [], False)
    pushing = connection.channel.unary_unary(PS_METHODS["Exchange"].path)
    push = encode_frame(Frame(pb.ExchangeRequest(sequence=1), {}))
    monkeypatch.setattr(admission, "_MOST_CALLS", 30)
    with ps._servicer.holder.lock:  # an update that takes long
        pushes = [pushing.future(push, timeout=60.0, metadata=connection.metadata) for _ in range(40)]
        assert connection.is_alive(PS_METHODS["Exchange"], 10.0)  # as the master asks, before it gives a server up
        assert set().union(*control.refused_calls()) <= {"too many at once"}  # by shared memory, and so by `Attach`
        assert control.links[0]._connection.transport_of(ECHO).side.link is not None
        assert connection.call(PS_METHODS["RefusedCalls"], Frame(pb.RefusedCallsRequest(), {}), 10.0)
        assert sum(each.done() for each in pushes) <= 10  # those that are too many
    connection.close()
    control.close()
    ps.stop()


def test_calls_beyond_the_most_are_refused_and_taken_later(serve, monkeypatch):
    monkeypatch.setattr(admission, "_MOST_CALLS", 2)
    server = serve()
    held, let_go = threading.Semaphore(0), threading.Event()
    echo_of, server.answer = server.answer, lambda frame: held.release() or (let_go.wait(60) and echo_of(frame))
    answers = []
    calls = [threading.Thread(target=lambda: answers.append(server.call())) for _ in range(3)]
    for call in calls[:2]:
        call.start()
        held.acquire()
    assert server.refusal(b"", TOKEN, RELEASE) is grpc.StatusCode.RESOURCE_EXHAUSTED
    calls[2].start()  # which tries again until there is room
    let_go.set()
    for call in calls:
        call.join()
    assert answers == [7, 7, 7]
    assert server.counts["too many at once"] >= 1


# ---------------------------------------------------------------- the servers of a job

SETTINGS = JobSettings(command=Command.EVALUATE, name="test", directory="")


@pytest.fixture
def master():
    master = Master(ClusterSettings(), ExternalCluster(lambda line: None), lambda line: None, Access("secret"))
    master.start()
    yield master
    master.stop()


@pytest.fixture
def ps():
    server = PSServer(SETTINGS, None, access=Access("secret"))
    server.start()
    yield server
    server.stop()


def status_of(address, method, *metadata):
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"\xff", metadata=metadata, timeout=60.0)
    return caught.value.code(), caught.value.details()


MASTER_METHODS = [f"/elasticcb.Master/{method.name}" for method in pb.DESCRIPTOR.services_by_name["Master"].methods]
PS_PATHS = [method.path for method in PS_METHODS.values()]


def test_every_method_of_master_and_server_refuses_another_release_in_words(master, ps):
    for address, methods in ((master.address, MASTER_METHODS), (ps.address, PS_PATHS)):
        for method in methods:
            code, words = status_of(address, method, TOKEN, ("elasticcb-protocol", str(PROTOCOL + 1)))
            assert code is grpc.StatusCode.FAILED_PRECONDITION, method
            assert f"uses protocol {PROTOCOL + 1}" in words
    assert master.refused_calls() == {"of another release": len(MASTER_METHODS)}


def test_every_method_of_master_and_server_asks_for_the_token(master, ps):
    for address, methods in ((master.address, MASTER_METHODS), (ps.address, PS_PATHS)):
        for method in methods:
            assert status_of(address, method, RELEASE)[0] is grpc.StatusCode.UNAUTHENTICATED, method


def test_a_message_that_no_master_can_read_is_refused_in_words(master):
    code, words = status_of(master.address, "/elasticcb.Master/GetTask", TOKEN, RELEASE)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "can't be read" in words
    assert master.refused_calls() == {"malformed": 1}


def test_a_server_refuses_a_master_that_was_replaced(ps):
    def master(run, term):
        return TrainingControl([ps.address], [], False, access=Access("secret", term=(run, term)), run=run)

    old, new, other = master("abc", 1), master("abc", 2), master("later", 1)
    assert old.refused_calls() == [{}]
    assert new.refused_calls() == [{}]
    with pytest.raises(ReplacedError, match="Another master took over this job"):
        old.links[0].call("SetLearningRate", Frame(pb.SetLearningRateRequest(learning_rate=1.0), {}))
    assert new.refused_calls() == [{"of a master that was replaced": 1}]
    assert other.refused_calls() == [{"of a master that was replaced": 1}]  # the next training begins with term 1
    for control in (old, new, other):
        control.close()


def test_the_master_asks_the_servers_what_they_refused(ps):
    for _ in range(3):
        status_of(ps.address, "/elasticcb.ParameterServer/Exchange", RELEASE)
    status_of(ps.address, "/elasticcb.ParameterServer/Exchange", TOKEN, RELEASE)
    control = TrainingControl([ps.address], [], False, access=Access("secret"))
    assert control.refused_calls() == [{"without the job's token": 3, "malformed": 1}]
    control.close()


def test_the_summary_tells_of_refused_calls_when_there_are_any():
    refused = {"without the job's token": 1_200, "malformed": 3}
    lines = summary_lines(JobSnapshot(command=Command.TRAIN, seconds=1.0, refused_calls=refused))
    assert [line for line in lines if "refused" in line] == [
        f"  {'calls refused':<34}1,200 without the job's token, 3 malformed"
    ]
    assert not [line for line in summary_lines(JobSnapshot(command=Command.TRAIN, seconds=1.0)) if "refused" in line]
