"""Real child processes; they look for a master that is not there."""

import signal

import psutil
import pytest

from elasticcb.cluster.local import LocalCluster

NOBODY = "127.0.0.1:9"


@pytest.fixture
def cluster(tmp_path):
    cluster = LocalCluster(str(tmp_path))
    yield cluster
    cluster.stop(0.0)


def environment(cluster, role, index):
    """Of a process that was started a moment ago: the kernel shows it when the program has been loaded."""
    process = psutil.Process(cluster.pid(role, index))
    while not (variables := process.environ()):
        pass
    return variables


def test_each_worker_gets_a_gpu_of_its_own_and_servers_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    cluster = LocalCluster(str(tmp_path))
    for role, index, expected in (("worker", 0, "2"), ("worker", 1, "5"), ("worker", 2, "2"), ("ps", 0, "-1")):
        cluster.start(role, index, NOBODY)
        assert environment(cluster, role, index)["CUDA_VISIBLE_DEVICES"] == expected
    cluster.stop(0.0)


def test_processes_get_the_allocator_settings(cluster):
    cluster.start("worker", 0, NOBODY)
    assert int(environment(cluster, "worker", 0)["MALLOC_MMAP_THRESHOLD_"]) == 1 << 30


def test_a_process_that_is_killed_is_reported_once_with_the_signal(cluster):
    cluster.start("worker", 3, NOBODY)
    process = psutil.Process(cluster.pid("worker", 3))
    process.send_signal(signal.SIGKILL)
    while not (exits := cluster.poll()):
        pass
    (exit,) = exits
    assert (exit.role, exit.index, exit.pid, exit.failed) == ("worker", 3, process.pid, False)
    assert exit.reason == "killed by SIGKILL"
    assert cluster.poll() == []


def test_a_process_that_hangs_is_killed_and_not_reported(cluster):
    cluster.start("ps", 0, NOBODY)
    process = psutil.Process(cluster.pid("ps", 0))
    process.suspend()
    cluster.kill("ps", 0)
    assert not process.is_running()
    assert cluster.poll() == []


def test_a_process_that_is_still_there_makes_room_for_the_one_in_its_place(cluster):
    cluster.start("worker", 0, NOBODY)
    first = psutil.Process(cluster.pid("worker", 0))
    first.suspend()
    cluster.start("worker", 0, NOBODY)
    assert not first.is_running()
    assert cluster.pid("worker", 0) != first.pid
    assert cluster.poll() == []


def test_stop_ends_even_a_process_that_does_not_listen(cluster):
    cluster.start("worker", 0, NOBODY)
    process = psutil.Process(cluster.pid("worker", 0))
    process.suspend()  # SIGTERM waits until it goes on
    cluster.stop(0.1)
    assert not process.is_running()


def test_the_last_lines_of_a_log_are_at_hand(cluster, tmp_path):
    (tmp_path / "logs" / "ps-1.log").write_text("".join(f"line {n}\n" for n in range(100)))
    assert cluster.log_tail("ps", 1, lines=2) == "line 98\nline 99"
    assert cluster.log_tail("ps", 7) == ""
