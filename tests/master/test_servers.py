"""The servers of a job as the master tends to them: real servers, of which one is replaced; no driving thread."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import keras
import numpy as np
import pytest

from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import CheckpointError
from elasticcb.master.master import Master
from elasticcb.master.members import Role
from elasticcb.master.servers import Saves, Servers
from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue
from elasticcb.optimizers.state import ModelState, Optimizers
from elasticcb.ps.server import PSServer
from elasticcb.settings import ClusterSettings, TrainingSettings
from elasticcb.sharding.partition import VariableSpec
from helpers_ps import alone, server_settings

SPECS = (VariableSpec("kernel", (30, 4), "float32", True), VariableSpec("bias", (4,), "float32", True))
MODEL = ModelState([np.ones(spec.shape, spec.dtype) for spec in SPECS])


class Job:
    """A job without workers, whose servers start when they are asked for."""

    def __init__(self, folder, num_ps):
        self.settings = server_settings(
            folder, training=TrainingSettings(updates="async"), cluster=ClusterSettings(num_workers=1, num_ps=num_ps)
        )
        self.running, self.lines = {}, []
        self.master = Master(self.settings.cluster, ExternalCluster(lambda line: None), self.lines.append)
        self.master.server.begin_job(self.settings)
        for index in range(num_ps):
            self.start(index)
        self.servers = Servers(
            self.master.server, lambda id: None, SPECS, True, Optimizers(), lambda: MODEL, self.lines.append, run="run"
        )
        self.servers.control.initialize(MODEL)

    def start(self, index):
        server = PSServer(self.settings, alone(lambda: keras.optimizers.SGD(1.0)))
        server.start()
        self.running[index] = self.master.server.register(Role.PS, index, server.address, 1, "here"), server

    def lose(self, index):
        member, server = self.running[index]
        server.stop(0.0)
        self.master.server.lost(member.id, "it was killed")

    def close(self):
        self.servers.close()
        for _, server in self.running.values():
            server.stop(0.0)
        self.master.stop()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path, 2)
    yield job
    job.close()


def test_the_model_moves_off_a_replaced_server_that_nobody_has_called_since(job, monkeypatch):
    monkeypatch.setattr("elasticcb.master.servers._LEAVE_SECONDS", 0.0)  # nobody here ends the other server
    job.lose(0)
    job.start(0)
    job.servers.restore_lost()
    assert "Parameter server 0 recovered" in job.lines[-1]
    assert str(job.servers.resize(1)).startswith("The job now has 1 parameter server (was 2).")
    weights, _ = job.servers.control.client.weights()
    assert all(np.array_equal(*each) for each in zip(weights, MODEL.weights, strict=True))


def test_a_server_that_is_lost_while_it_saves_is_replaced_before_the_model_moves(job, monkeypatch):
    monkeypatch.setattr("elasticcb.master.servers._LEAVE_SECONDS", 0.0)
    job.servers.control.persist()
    asked, goes_on = threading.Event(), threading.Event()
    handlers = job.running[0][1]._servicer.handlers
    monkeypatch.setitem(handlers, "Save", lambda frame: (asked.set(), goes_on.wait()))
    with ThreadPoolExecutor() as pool:
        saved = pool.submit(job.servers.control.persist)
        assert asked.wait(30)
        moved = pool.submit(job.servers.resize, 1)
        assert not wait([moved], timeout=0.5).done
        job.lose(0)
        job.start(0)
        goes_on.set()
        saved.result(timeout=30)
        assert moved.result(timeout=30).servers == 1


def test_the_number_of_servers_stays_if_their_files_are_not_seen_here(job):
    job.servers.control.persist()
    next(job.servers.control.recovery.folder.glob("ps-0-*")).unlink()  # as on another machine
    with pytest.raises(CheckpointError, match="share the job's folder"):
        job.servers.resize(1)
    weights, _ = job.servers.control.client.weights()
    assert all(np.array_equal(*each) for each in zip(weights, MODEL.weights, strict=True))
    assert len(job.servers.places) == 2


class UnsavedQueue(TaskQueue):
    """Always has something to save.

    Attributes:
        again: set when something is saved for the second time.
    """

    wants_save, all_trained = True, False

    def __init__(self):
        super().__init__(QueueSettings(records_per_task=10, minibatch_size=1), training=[("a", 10)])
        self._saves, self.again = itertools.count(1), threading.Event()

    def begin_save(self):
        return 0

    def saved(self, mark, written=True):
        if next(self._saves) == 2:
            self.again.set()


def test_waiting_for_a_lost_server_does_not_count_as_writing(job, monkeypatch):
    monkeypatch.setattr("elasticcb.master.servers._PAUSE_FACTOR", 1e6)  # so that the next file is written long after it
    queue = UnsavedQueue()
    job.servers._saves.close()
    job.lose(0)
    with job.master.server.state() as state:
        state.queue = queue
    saves = Saves(job.master.server, job.servers.control, 0.01)
    job.start(0)
    assert queue.again.wait(30)
    saves.close()
