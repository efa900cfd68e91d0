"""What a master tells people who start its processes."""

from pathlib import Path

import pytest

from elasticcb.cluster.base import BackendContext
from elasticcb.cluster.registry import make_backend
from elasticcb.security.tls import make_ca
from elasticcb.settings import ClusterSettings


@pytest.fixture
def backends():
    """Those that were started."""
    return []


@pytest.fixture
def lines_of(tmp_path, monkeypatch, backends):
    """What is shown when a server and a worker are wanted."""
    monkeypatch.delenv("ELASTICCB_JOB_TOKEN", raising=False)

    def start(**given):
        lines = []
        settings = ClusterSettings(kind="external", **given)
        backend = make_backend(BackendContext(settings, str(tmp_path), "INFO", lines.append, lambda process: None))
        for role in ("ps", "worker"):
            backend.start(role, 0, "10.0.0.1:50001")
        assert not [line for line in lines if backend.access.token in line]
        backends.append(backend)
        return lines

    return start


def test_files_to_copy_are_told_once_and_the_commands_read_them(lines_of, tmp_path):
    copied, address, server, worker = lines_of()
    folder = tmp_path
    assert f"mkdir -pm 700 {folder} && scp -pr {folder}/token {folder}/tls MACHINE:{folder}/" in copied
    assert "--host=ADDRESS" in address
    command = f'ELASTICCB_JOB_TOKEN="$(cat {folder}/token)" elasticcb {{}} --master 10.0.0.1:50001 --index 0'
    assert server == f"Waiting for: {command.format('ps')} --tls_ca={folder}/tls/ca.pem"
    assert worker == f"Waiting for: {command.format('worker')} --tls_ca={folder}/tls/ca.pem"
    assert (folder / "token").stat().st_mode & 0o077 == 0
    assert (folder / "tls" / "ca.pem").is_file()


def test_a_token_that_the_user_has_chosen_is_in_no_file(lines_of, tmp_path, monkeypatch):
    monkeypatch.setattr("elasticcb.cluster.external.token_of_environment", lambda: "chosen")
    monkeypatch.setattr("elasticcb.cluster.registry.token_of_environment", lambda: "chosen")
    copied, *_, worker = lines_of()
    assert f"scp -pr {tmp_path}/tls MACHINE:" in copied
    assert "ELASTICCB_JOB_TOKEN=$ELASTICCB_JOB_TOKEN elasticcb worker" in worker
    assert not (tmp_path / "token").exists()


def test_without_tls_only_the_token_is_to_be_copied(lines_of, tmp_path):
    warned, copied, _, server, worker = lines_of(insecure=True)
    assert "run without TLS: " in warned
    assert f"scp -pr {tmp_path}/token MACHINE:" in copied
    assert server.endswith("--insecure")
    assert worker.endswith("--insecure")
    assert not (tmp_path / "tls").exists()


def test_nothing_is_left_of_a_job_by_which_processes_of_another_run_would_be_refused(lines_of, backends, tmp_path):
    lines_of()
    backends[0].stop(0.0)
    assert [each for each in tmp_path.rglob("*") if not each.is_dir()] == []


def test_a_ca_of_the_users_own_is_neither_copied_into_the_job_nor_removed(lines_of, backends, tmp_path):
    own = make_ca(str(tmp_path / "own")).files.tls_ca
    copied, *_, worker = lines_of(tls_ca=own)
    assert f"scp -pr {tmp_path}/token MACHINE:" in copied
    assert worker.endswith(f"--tls_ca={own}")
    backends[0].stop(0.0)
    assert Path(own).is_file()
