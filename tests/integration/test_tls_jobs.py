"""Jobs whose processes speak TLS, as real processes: started by the master, and by hand."""

import re
import stat
import time

import pytest
from waiting import wait_until

from elasticcb.cli.main import main
from elasticcb.clients.master import MasterClient
from elasticcb.clients.running_master import running_master
from elasticcb.errors import ConnectionLostError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import MASTER_METHODS
from elasticcb.security.credentials import Access
from elasticcb.security.tls import diagnose
from jobs import GATE, LINEAR_MODEL, PACE, linear_data, open_gate, records_trained, train_flags, write_model_file
from metrics_scrapes import Scrape


@pytest.fixture
def data(tmp_path):
    write_model_file(tmp_path, LINEAR_MODEL, "linear")
    linear_data(tmp_path, train=2_000, test=400)
    return tmp_path


def files_of(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def private_lines(path):
    """Of the key in a PEM file."""
    return path.read_text().partition("-----BEGIN PRIVATE KEY-----\n")[2].splitlines()[:-1]


def is_owners_alone(path):
    return stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_a_job_with_a_ca_of_its_own_trains_and_is_scaled_and_keeps_its_secrets(data, start_job):
    write_model_file(data, LINEAR_MODEL + GATE.format(version=100), "linear")
    job = start_job("train", *train_flags(data, "linear", num_epochs=3, num_ps=2), "--tls")
    job.wait_for_line(r"Evaluation at version|epoch 1|accuracy|loss")
    folder = data / "job"
    master = running_master(str(folder))
    assert "it uses TLS" in diagnose(master.address, None)
    assert diagnose(master.address, master.access.tls) == ""

    assert is_owners_alone(folder)
    assert is_owners_alone(folder / "master.json")
    assert is_owners_alone(folder / "tls" / "ca.pem")

    stranger = Connection(master.address, "the master", access=Access("guess", master.access.tls))
    for _ in range(10):
        with pytest.raises(ConnectionLostError, match="UNAUTHENTICATED"):
            stranger.call(MASTER_METHODS["GetSettings"], pb.GetSettingsRequest())
    stranger.close()

    client = MasterClient(master.address, access=master.access)
    assert client.scale(3) == 2
    client.close()
    open_gate(data)
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [2_000] * 3
    assert re.search(r"calls refused +10 without the job's token", job.output), job.output
    secrets = [master.token, *private_lines(folder / "tls" / "ca.pem")]
    written = {path: path.read_bytes() for path in files_of(folder) if path.parent.name != "tls"}
    assert len(written) > 5
    assert not [path for path, content in written.items() for secret in secrets if secret.encode() in content]
    assert not [secret for secret in secrets if secret in job.output]


@pytest.mark.deep  # tests/test_tls_renewal.py shows that processes renew them
def test_a_job_outlives_its_certificates_and_its_processes_are_replaced_meanwhile(data, start_job, faults):
    write_model_file(data, LINEAR_MODEL + PACE.format(seconds=0.05), "linear")
    faults.shorten("elasticcb.security.certificates.LIFE_SECONDS", 5.0)
    flags = {"num_epochs": 1_000, "host": "127.0.0.1", "checkpoint_interval": 1, "metrics_port": 0}
    flags["num_minibatches_per_task"] = 5  # what ends the job waits for tasks that run
    job = start_job("train", *train_flags(data, "linear", **flags, evaluation_steps=50))
    metrics = re.search(r"http://(\S+)/metrics", job.wait_for_line(r"Metrics are served at"))[1]
    job.wait_for_line(r"Evaluation at version")
    ca = data / "job" / "tls" / "ca.pem"
    before = ca.read_bytes()

    def expiries():
        """By role, as the process has told last."""
        scrape = Scrape(metrics)
        seconds = {role: scrape.find("elasticcb_certificate_expiry_seconds", role=role, index="0") for role in roles}
        return {role: time.time() + left for role, left in seconds.items()}

    roles = ("master", "worker", "ps")

    def wait_for_their_end():
        """Waits until all certificates that there are have expired; answers when the last one did."""
        end = max(expiries().values())
        wait_until(lambda: time.time() > end)
        return end

    first = wait_for_their_end()
    job.kill("ps")
    job.wait_for_line(r"Parameter server 0 recovered")
    job.kill("worker", 1)
    job.wait_for_line(r"Evaluation at version")
    second = wait_for_their_end()
    job.master.kill()
    job.wait_for_line(r"The master recovered in")
    job.wait_for_line(r"Evaluation at version")
    wait_until(lambda: first < second < min(expiries().values()))  # a process tells the master at times
    assert ca.read_bytes() == before
    assert main(["stop", str(data / "job")]) == 0
    assert job.finish() == 130, job.output
    assert job.output.count(" was lost: killed by SIGKILL") == 2

    resumed = start_job("resume", str(data / "job"))
    resumed.wait_for_line(r"Evaluation at version")
    assert ca.read_bytes() != before
    resumed.interrupt()
    assert resumed.finish() == 130, resumed.output
