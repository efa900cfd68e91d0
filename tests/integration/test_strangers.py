"""Whatever the processes of a job listen on, in each kind of job: another user of the machine is refused everything."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import stat
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from strangers import answers, hears, listening, takes

import elasticcb
from deep_cases import deep_but
from elasticcb.clients.running_master import running_master
from jobs import LINEAR_MODEL, PACE, linear_data, train_flags, write_model_file

X, Y = np.ones((64, 4), np.float32), np.ones((64, 1), np.float32)


WITH_TLS, WITHOUT_TLS = ["TLS refused", "UNAVAILABLE"], ["UNAUTHENTICATED"]  # a port of the job


def assert_all_refuse(sockets, servers, open_to_all=None, port=WITH_TLS):
    """All sockets refuse, and so many of them are ports of the job; those of `open_to_all` answer as it says."""
    found = answers(sockets)
    assert {where: found.pop(where, None) for where in open_to_all or {}} == (open_to_all or {})
    assert all(answered in (port, ["closed"], ["refused"]) for answered in found.values()), found
    assert sum(answered == port for answered in found.values()) == servers, found
    assert all(where.startswith(("127.0.0.1:", "@", "/")) for where in sockets), sockets


def assert_in_one_folder(sockets, listeners):
    """None is a port; so many lie in the job's folder for sockets. Returns that folder."""
    assert all(each.startswith(("@", "/")) for each in sockets), sockets
    folders = Counter(Path(each).parent for each in sockets if each.startswith("/"))
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o700 for each in folders)
    ((folder, found),) = ((each, found) for each, found in folders.items() if each.name.startswith("elasticcb-"))
    assert found == listeners
    return folder


def sockets_of(job):
    process = psutil.Process(job.process.pid)
    return listening([process, *process.children(recursive=True)])


def generator():
    while True:
        yield X, Y


def test_a_python_cluster_with_every_kind_of_data(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before = set(listening([psutil.Process()]))
    with elasticcb.Cluster(num_workers=1, num_ps=2) as cluster:
        cluster.fit(model, X, Y, verbose=0)
        cluster.fit(model, generator(), steps_per_epoch=3, verbose=0)
        cluster.fit(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), verbose=0)
        cluster.evaluate(model, X, Y, verbose=0)
        cluster.predict(model, X, verbose=0)
        me = psutil.Process()
        sockets = [each for each in listening([me, *me.children(recursive=True)]) if each not in before]
        assert_all_refuse(sockets, servers=0)
        assert_in_one_folder(sockets, listeners=3)


@pytest.fixture
def data(tmp_path):
    write_model_file(tmp_path, LINEAR_MODEL + PACE.format(seconds=0.1), "linear")
    linear_data(tmp_path, train=400, test=100)
    return tmp_path


def started(start_job, data, *more, command="train", **flags):
    """A job that would last for an hour; of `train`, when all its processes are in use."""
    small = {"num_workers": 1, "num_epochs": 500, "evaluation_steps": 4, "num_minibatches_per_task": 2}
    job = start_job(command, *train_flags(data, "linear", **small, **flags), *more)
    if command == "train":
        job.wait_for_line("Evaluation at version")
    return job


def test_a_command_whose_ports_for_metrics_and_health_alone_answer_and_whose_killed_server_nobody_else_can_replace(
    data, start_job
):
    job = started(start_job, data, metrics_port=0, health_port=0, num_ps=2, checkpoint_interval=1)
    master = running_master(data / "job")
    answered = {master.metrics: ["UNAVAILABLE", "metrics"], master.health: ["UNIMPLEMENTED"]}
    sockets = sockets_of(job)
    assert_all_refuse(sockets, 0, answered)
    folder = assert_in_one_folder([each for each in sockets if each not in answered], 3)
    before = [each for each in listening(job.children("ps")[:1]) if each.startswith("/")]
    job.kill("ps")
    assert set(itertools.chain(*takes(before).values())) == {"PermissionError"}
    job.wait_for_line("Parameter server 0 recovered")
    after = [each for each in listening(job.children("ps")[:1]) if each.startswith("/")]
    assert_in_one_folder(after, 1)
    assert before != after
    os.kill(job.process.pid, signal.SIGKILL)
    job.assert_no_orphans()
    assert not folder.exists()  # whatever was killed


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


ANSWERS = {(): WITH_TLS, ("--insecure",): WITHOUT_TLS}


@pytest.mark.deep  # the next test's master has a port that was chosen, too
def test_a_job_whose_port_was_chosen_listens_there(data, start_job, port):
    job = started(start_job, data, "--insecure", port=port)
    assert_all_refuse(sockets_of(job), 2, port=WITHOUT_TLS)
    assert running_master(data / "job").address == f"127.0.0.1:{port}"
    job.interrupt()
    job.finish()
    assert job.output.count("The processes of this job run without TLS: ") == 1


@pytest.mark.parametrize("flags", deep_but(ANSWERS, ()))
def test_a_master_whose_processes_are_started_by_hand_makes_a_token_that_no_stranger_is_sent_with_tls(
    data, start_job, port, monkeypatch, flags
):
    monkeypatch.delenv("ELASTICCB_JOB_TOKEN", raising=False)
    job = started(start_job, data, *flags, command="master", port=port)
    line = job.wait_for_line("Waiting for: .* elasticcb ps")
    assert_all_refuse(sockets_of(job), 1, port=ANSWERS[flags])
    assert running_master(data / "job").address == f"127.0.0.1:{port}"
    command = re.search(r"elasticcb (ps .*)", line)[1].split()
    without = start_job(*command)
    assert without.finish() == 2
    assert "ELASTICCB_JOB_TOKEN is not set" in without.output
    token = data / "job" / "token"
    assert f'ELASTICCB_JOB_TOKEN="$(cat {token})"' in line
    assert token.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("ELASTICCB_JOB_TOKEN", token.read_text())
    server = start_job(*command)
    server.wait_for_line("Started")
    worker = start_job("worker", *command[1:3], command[-1])
    job.wait_for_line("Evaluation at version")
    assert_all_refuse([*sockets_of(job), *sockets_of(server), *sockets_of(worker)], 2, port=ANSWERS[flags])

    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    for tls in (False, True):
        # Its processes look for their master.
        heard = hears(f"127.0.0.1:{port}", tls, attempts=3)
        assert (token.read_text() in heard) is bool(flags and not tls), heard
    for process in (server, worker):
        process.process.kill()
