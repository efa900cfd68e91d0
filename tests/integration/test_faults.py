"""Faults of processes, and of the network between them, in real jobs (tests/faults)."""

import re
import signal

import pytest
from faulty_process import EVENTS, function_of
from health_probe import SERVING, check

from jobs import LINEAR_MODEL, PACE, linear_data, number, records_trained, train_flags, write_model_file

pytestmark = pytest.mark.timeout(600)  # they wait for what does not answer

RECORDS, EVALUATED = 1_200, 200
IS_BACK = r"Parameter server \d recovered in [\d.]+ s from its recovery files"


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_a_function_that_exists(event):
    owner, name, _ = function_of(event)
    assert callable(getattr(owner, name))


@pytest.fixture
def data(tmp_path):
    write_model_file(tmp_path, LINEAR_MODEL + PACE.format(seconds=0.01), "linear")
    linear_data(tmp_path, train=RECORDS, test=EVALUATED)
    return tmp_path


def flags(folder, **more):
    small = {"num_epochs": 1, "evaluation_steps": 40, "checkpoint_interval": 0.2, "num_minibatches_per_task": 10}
    return train_flags(folder, "linear", **{**small, **more})


def assert_complete(job):
    """The job has ended well, and every record was trained, or evaluated once in each round."""
    assert job.finish() == 0, job.output
    assert {*records_trained(job.output)} == {RECORDS}
    rows = {int(float(count)) for count in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)}
    assert rows == {EVALUATED}
    job.assert_no_orphans()


MOMENTS = ("asks for a task", "evaluates a batch")
STOPPED = "(no heartbeat for 4 s|it made no progress on its task)"  # whichever is noticed first


@pytest.mark.deep  # the next test has a case
@pytest.mark.parametrize("event", MOMENTS)
def test_a_worker_that_is_stopped_is_replaced_whatever_it_was_doing(data, start_job, faults, event):
    happened = faults.fail_at("worker", 0, event, "stop")
    job = start_job("train", *flags(data, num_workers=1, lease_seconds=4, silence_seconds=4))
    job.wait_for_line(rf"worker 0 .* was lost: {STOPPED}; restart 1 of 10")
    assert_complete(job)
    assert happened()
    assert number(job.output, "workers lost") >= 1


def test_workers_that_are_stopped_or_reach_neither_the_master_nor_a_server_are_replaced(data, start_job, faults):
    with faults.network() as network:
        job = start_job("train", *flags(data, num_workers=3, lease_seconds=4, silence_seconds=4))
        job.wait_for_line(r"Evaluation at version")
        routes = [network.route("worker-0", "master"), network.route("worker-1", "ps")]
        for route in routes:
            route.partition()
        job.children("worker")[2].suspend()
        for _ in range(3):
            job.wait_for_line(r"worker \d .* was lost: .*restart \d of 10")
        assert re.search(rf"worker 2 .* was lost: {STOPPED}", job.output)
        for route in routes:
            route.heal()
        assert_complete(job)
        assert number(job.output, "workers lost") >= 3
        assert number(job.output, "parameter servers lost") == 0


def test_a_server_whose_answers_are_late_is_waited_for_and_one_that_nobody_reaches_is_replaced(data, start_job, faults):
    with faults.network() as network:
        job = start_job("train", *flags(data, num_epochs=2, silence_seconds=3))
        for _ in range(2):
            job.wait_for_line(r"Evaluation at version")
            for source in ("worker-0", "worker-1"):
                network.route(source, "ps").delay(0.005)
                network.route(source, "ps").cut()
            network.route("worker-1", "master").cut()
        for _ in range(2):  # by connections that were made again
            job.wait_for_line(r"Evaluation at version")
        for source in ("master-0", "worker-0", "worker-1"):
            network.route(source, "ps").partition()
            network.route(source, "ps").cut()
        job.wait_for_line(r"parameter server 0 .* was lost: unreachable for 3 s; restart 1 of 10")
        job.wait_for_line(IS_BACK)
        assert_complete(job)
        assert number(job.output, "parameter servers lost") == 1
        assert number(job.output, "workers lost") == 0


def test_processes_started_by_hand_are_refused_once_they_were_given_up_and_without_them_sigterm_ends_the_master(
    data, start_job, faults, monkeypatch
):
    monkeypatch.setenv("ELASTICCB_JOB_TOKEN", "chosen")
    faults.shorten("elasticcb.master.job._RESTORE_SECONDS", 2.0)  # for which it waits for others in their places
    more = {"num_workers": 1, "num_epochs": 100, "silence_seconds": 3, "cluster": "external"}
    job = start_job("train", *flags(data, **more), "--checkpoint_dir=c")
    line = job.wait_for_line(r"elasticcb worker --master")
    master, tls = ("--master", re.search(r"--master (\S+)", line)[1]), re.search(r"--tls_ca=\S+", line)[0]
    join = (*master, tls)
    plain = start_job("worker", *master, "--insecure")
    processes = {"ps": start_job("ps", *join, "--health_port=0")}
    line = processes["ps"].wait_for_line("Health checks are answered at")
    health = re.search(r"answered at (\S+)", line)[1].rstrip(".")
    assert check(health, "") == SERVING
    processes["worker"] = start_job("worker", *join)
    job.wait_for_line(r"training: epoch 1/100")
    assert check(health, "elasticcb.ParameterServer") == SERVING
    assert plain.finish() == 1
    assert "it uses TLS, but this process does not" in plain.output
    for role in ("worker", "ps"):
        job.wait_for_line(r"Evaluation at version")
        processes[role].process.send_signal(signal.SIGSTOP)
        job.wait_for_line(rf"{role} 0 does not answer; stop it on its machine")
        job.wait_for_line(r"was lost: no heartbeat for 3 s")
        processes[role].process.send_signal(signal.SIGCONT)
        assert processes[role].finish() == 2
        assert "is no longer part of the job: no heartbeat for 3 s" in processes[role].output
        processes[role] = start_job(role, *join)
    job.wait_for_line(r"Evaluation at version")
    for process in processes.values():
        process.process.kill()
    job.wait_for_line(r"parameter server 0 .* was lost")
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(60) == 130
    assert job.finish() == 130
    assert {int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)} == {EVALUATED}
    assert "The checkpoint could not be written: Parameter server 0 was lost" in job.output
    assert "To resume it: elasticcb resume" in job.output
