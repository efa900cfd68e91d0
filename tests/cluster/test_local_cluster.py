"""Real child processes; they look for a master that is not there."""

import ast
import operator
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest

from certificates import CA
from elasticcb.cluster.base import BackendContext
from elasticcb.cluster.local.backend import LocalCluster
from elasticcb.cluster.local.fork_server import can_fork
from elasticcb.cluster.role import RoleProcess, common_environment
from elasticcb.launch.fork_process import draw_own_random_numbers
from elasticcb.process.devices import gpus_hidden, usable_cores, visible_gpus
from elasticcb.rpc import connection as connection_module
from elasticcb.security.credentials import Access
from elasticcb.security.tls import TLS
from elasticcb.settings import ClusterSettings

NOBODY = "127.0.0.1:9"


def local(folder, **settings):
    return LocalCluster(BackendContext(ClusterSettings(**settings), str(folder), "INFO", print, print))


@pytest.fixture
def cluster(tmp_path):
    cluster = local(tmp_path)
    yield cluster
    cluster.stop(0.0)


def environment(cluster, role, index):
    return cluster.environment(RoleProcess(role=role, index=index, master=NOBODY))


def test_each_worker_gets_a_gpu_of_its_own_and_leaves_memory_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # of the user
    cluster = local(tmp_path)
    for index, expected in enumerate(("2", "5", "2")):
        given = environment(cluster, "worker", index)
        assert given["CUDA_VISIBLE_DEVICES"] == expected
        assert (given["TF_FORCE_GPU_ALLOW_GROWTH"], given["XLA_PYTHON_CLIENT_PREALLOCATE"]) == ("true", "true")


def test_workers_without_gpus_get_no_settings_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in environment(local(tmp_path), "worker", 0)


def test_a_server_sees_no_gpu_whoever_has_started_it():
    program = (
        "import os; from elasticcb.cluster.role import RoleProcess; from elasticcb.roles.process import begin\n"
        f"begin(RoleProcess(role=os.environ['ROLE'], master='{NOBODY}')); print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    given = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1", "ROLE": "ps"}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "-1"


def test_what_is_imported_before_processes_are_forked_finds_no_gpu(monkeypatch):
    for before in ("0,1", None):
        if before is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        with gpus_hidden():
            assert visible_gpus() == []
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_workers_share_the_cores_and_servers_leave_room_for_them(tmp_path, monkeypatch):
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    cluster = local(tmp_path, num_workers=1, num_ps=1)
    for role, sharing in (("worker", 1), ("ps", 2)):
        assert int(environment(cluster, role, 0)["TF_NUM_INTRAOP_THREADS"]) == max(1, usable_cores() // sharing)


def test_processes_get_the_allocator_settings(tmp_path):
    cluster = local(tmp_path)
    assert environment(cluster, "worker", 0).items() >= common_environment("INFO").items()


def test_the_last_lines_of_a_log_are_at_hand(cluster, tmp_path):
    (tmp_path / "logs" / "ps-1.log").write_text("".join(f"line {n}\n" for n in range(100)))
    assert cluster.log_tail("ps", 1, lines=2) == "line 98\nline 99"
    assert cluster.log_tail("ps", 7) == ""


def test_the_master_listens_in_a_folder_of_sockets_that_goes_with_the_cluster(cluster):
    folder = Path(cluster.host.removeprefix("unix:"))
    assert cluster.host == f"unix:{folder}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "1"))
    cluster.stop(0.0)
    assert not folder.exists()


def test_the_master_listens_at_a_port_with_certificates_or_where_one_was_chosen(tmp_path):
    cluster = local(tmp_path, port=50001)
    assert cluster.host == "127.0.0.1"
    cluster = local(tmp_path)
    cluster.access = Access("token", TLS.load(CA(tmp_path).issue()))
    assert cluster.host == "127.0.0.1"


# ------------------------------------------------------------ forked by one process


def the_zygote(cluster):
    """The process that forks others of this cluster."""
    return psutil.Process(cluster._fork_server._process.pid)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A cluster whose first process takes seconds to start, and the others none."""
    cluster = local(tmp_path_factory.mktemp("shared"))
    cluster.access = Access("token")  # without one its processes end at once
    yield cluster
    cluster.stop(0.0)


@pytest.fixture
def worker(shared):
    """Worker 0 of the shared cluster."""
    shared.start("worker", 0, NOBODY)
    yield psutil.Process(shared.pid("worker", 0))
    shared.kill("worker", 0)


def zygote_of(process):
    """The process that has forked it."""
    if not can_fork():
        pytest.skip("this system has no pidfds")
    return process.parent()


def test_a_process_that_is_killed_is_reported_once_with_the_signal(shared, worker):
    worker.send_signal(signal.SIGKILL)
    while not (exits := shared.poll()):
        pass
    (exit,) = exits
    assert (exit.role, exit.index, exit.pid, exit.failed) == ("worker", 0, worker.pid, False)
    assert exit.reason == "killed by SIGKILL"
    assert shared.poll() == []


def test_a_process_that_is_still_there_makes_room_for_the_one_in_its_place(shared, worker):
    worker.suspend()
    shared.start("worker", 0, NOBODY)
    assert not worker.is_running()
    assert shared.pid("worker", 0) != worker.pid
    assert shared.poll() == []


def test_a_process_shows_its_role_and_has_a_session_of_its_own(worker):
    while worker.name() != "worker-0":
        assert worker.is_running()  # it begins
    assert worker.cmdline()[0] == "elasticcb worker-0"
    assert os.getsid(worker.pid) == worker.pid


def test_nothing_runs_in_the_process_that_forks_but_threads_of_libraries_that_handle_forks(worker):
    zygote = zygote_of(worker)
    names = {Path(f"/proc/{zygote.pid}/task/{thread.id}/comm").read_text().strip() for thread in zygote.threads()}
    assert names <= {"python", "fork-process", Path(sys.executable).resolve().name, "jemalloc_bg_thd"}
    known = 1 + 2 * (os.cpu_count() - 1) + 1  # itself, two copies of OpenBLAS (NumPy's, SciPy's), pyarrow's jemalloc
    assert zygote.num_threads() <= known


def test_processes_go_on_and_new_ones_start_when_the_one_that_forks_is_killed(shared, worker):
    zygote = zygote_of(worker)
    zygote.kill()
    zygote.wait()
    assert shared.poll() == []
    assert worker.is_running()
    shared.start("ps", 0, NOBODY)
    second = psutil.Process(shared.pid("ps", 0))
    assert second.parent() == psutil.Process()
    while not (command := second.cmdline()):  # it has not been loaded
        pass
    assert "ps" in command or command[0] == "elasticcb ps-0"
    worker.kill()
    while not (exits := shared.poll()):
        pass
    assert "exit code is unknown" in exits[0].reason
    assert not exits[0].failed
    second.suspend()
    shared.stop(0.1)  # ends also what does not listen
    assert not second.is_running()


def test_what_is_imported_before_forking_runs_no_operation():
    code = """
    from elasticcb.launch.fork_process import import_roles
    import_roles()
    from tensorflow.python.eager import context
    import threading
    assert context.context_safe() is None, "TensorFlow's context exists"
    assert threading.active_count() == 1, threading.enumerate()
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_what_was_not_forked_yet_when_the_one_that_forks_is_killed_is_started_all_the_same(cluster):
    cluster.prepare()
    zygote = the_zygote(cluster)
    zygote.suspend()
    cluster.start("worker", 0, NOBODY)
    zygote.kill()
    assert psutil.Process(cluster.pid("worker", 0)).parent() == psutil.Process()


def test_stop_does_not_wait_for_processes_that_are_not_there_yet(cluster, caplog):
    cluster.start("worker", 0, NOBODY)
    zygote = the_zygote(cluster)
    zygote.suspend()
    cluster.stop(10.0)
    assert not zygote.is_running()
    assert caplog.messages == []  # nobody need know how it is ended


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_draws_random_numbers_of_its_own():
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        draw_own_random_numbers()
        os.write(tell, repr((np.random.rand(), random.random(), connection_module._jitter.random())).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    drawn = (np.random.rand(), random.random(), connection_module._jitter.random())
    assert all(map(operator.ne, ast.literal_eval(os.read(told, 1000).decode()), drawn))
