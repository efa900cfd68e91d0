"""Jobs on a Ray cluster of several nodes, all of them on this machine, at addresses of their own."""

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

import psutil
import pytest

from jobs import GATE, LINEAR_MODEL, linear_data, open_gate, records_trained, train_flags, write_model_file
from warm import ensure_warm

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'elasticcb[ray]'")

pytestmark = pytest.mark.timeout(600)

RECORDS = 1_600
HEAD, NODES = "127.0.0.2", ("127.0.0.3", "127.0.0.4")  # Ray hangs at 127.0.0.1

FLAGS = {"cluster": "ray", "evaluation_steps": 50, "num_minibatches_per_task": 5}


@pytest.fixture(scope="module")
def cluster():
    """A head without room for processes, and two nodes with room for two each; `nodes_at` has these by address."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it becomes a part of the paths of sockets
    small = {"object_store_memory": 80 << 20, "num_gpus": 0, "include_dashboard": False}
    watch = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray writes a file there, wherever its own folder is
    ensure_warm()  # so that what forks the jobs is not taken for a process of Ray
    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, node_ip_address=HEAD, temp_dir=folder, _system_config=watch, **small)
        cluster.nodes_at = {host: cluster.add_node(num_cpus=2, node_ip_address=host, **small) for host in NODES}
        cluster.folder = folder
        yield cluster
    finally:
        started = set(psutil.Process().children(recursive=True)) - before
        with contextlib.suppress(Exception):
            cluster.shutdown()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def data(tmp_path, monkeypatch):
    write_model_file(tmp_path, LINEAR_MODEL + GATE.format(version=150), "linear")
    linear_data(tmp_path, train=RECORDS, test=200)
    monkeypatch.setenv("ELASTICCB_JOB_TOKEN", secrets.token_hex(16))
    return tmp_path


def job_processes(role=""):
    """The job's workers ("worker") and parameter servers ("ps"), wherever they run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            title, token = process.cmdline()[:1], process.environ().get("ELASTICCB_JOB_TOKEN")
            named = title and re.match(rf"elasticcb ({role or 'worker|ps'})-\d", title[0])
            if named and token == os.environ["ELASTICCB_JOB_TOKEN"]:
                found.append(process)
    return found


@pytest.mark.deep
def test_a_node_is_lost_with_a_parameter_server_and_every_record_is_trained_on_the_other(
    cluster, data, start_job, faults
):
    faults.shorten("elasticcb.cluster.ray.backend._PENDING_SECONDS", 1.0)
    flags = {**FLAGS, "ray_address": cluster.address, "num_workers": 3, "max_ps_restarts": 0, "checkpoint_interval": 1}
    job = start_job("train", *train_flags(data, "linear", **flags))
    job.wait_for_line(r"Evaluation at version")
    (server,) = job_processes("ps")
    listens = [each for each in server.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    host = listens[0].laddr.ip.removeprefix("::ffff:")
    cluster.remove_node(cluster.nodes_at.pop(host), allow_graceful=False)
    job.wait_for_line(rf"parameter server 0 .* was lost: its node {host} ")
    job.wait_for_line(r"it made room for parameter server 0")
    job.wait_for_line(r"Parameter server 0 recovered .* from its recovery files")
    waits = r"Not started yet: worker \d, worker \d \(no Ray node has a free CPU\)"
    if not re.search(waits, job.output):
        job.wait_for_line(waits)
    open_gate(data)
    assert job.finish() == 0, job.output

    assert records_trained(job.output) == [RECORDS]
    rows = [int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)]
    assert set(rows) == {200}
    assert not job_processes()


def test_ctrl_c_leaves_no_process_behind_and_ray_has_never_seen_the_token(cluster, data, start_job):
    open_gate(data)  # no task is held that would have to end first
    flags = {**FLAGS, "ray_address": cluster.address, "num_workers": 1, "num_epochs": 100}
    job = start_job("train", *train_flags(data, "linear", **flags))
    job.wait_for_line(r"Evaluation at version")
    processes = job_processes()
    assert len(processes) == 2
    job.interrupt()
    assert job.finish() == 130, job.output
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive

    token = os.environ["ELASTICCB_JOB_TOKEN"].encode()
    written = [path for path in Path(cluster.folder).rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if token in path.read_bytes()]
