"""What `elasticcb dashboard` and --dashboard say when there can be no page."""

import socket

import pytest

from elasticcb.cli.main import main
from elasticcb.cluster.registry import missing_for
from elasticcb.dashboard import beside
from elasticcb.settings import JOB_FILE, JOURNAL_FILE, STATUS_FILE, ClusterSettings


@pytest.fixture
def ended(tmp_path):
    (tmp_path / STATUS_FILE).write_text('{"phase": "done", "error": ""}')
    return str(tmp_path)


def test_a_missing_library_is_told_before_anything_starts(ended, monkeypatch, capsys):
    monkeypatch.setattr(beside, "_LIBRARIES", ("no_such_module",))
    assert main(["dashboard", ended]) == 2
    assert "pip install 'elasticcb[dashboard]'" in capsys.readouterr().err
    assert [text for text in missing_for(ClusterSettings(dashboard=True)) if "no_such_module" in text]
    assert not [*missing_for(ClusterSettings())]


def test_a_port_that_is_taken_is_told(ended, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["dashboard", ended, f"--port={other.getsockname()[1]}"]) == 2
    assert "Address already in use. Choose another --port" in capsys.readouterr().err


def test_a_job_that_was_killed_is_named_with_how_to_go_on(tmp_path, capsys):
    for name in (JOB_FILE, JOURNAL_FILE):
        (tmp_path / name).write_text("{}")
    assert main(["dashboard", str(tmp_path)]) == 2
    assert "elasticcb resume" in capsys.readouterr().err
    assert main(["dashboard", str(tmp_path / "nowhere")]) == 2
    assert "There is no job" in capsys.readouterr().err


def test_a_job_whose_master_runs_in_a_pod_has_no_page_beside_it(tmp_path, capsys):
    code = main(["train", "--cluster=kubernetes", "--image=some/image:1", "--dashboard", "--model_def=a.b"])
    assert code == 2
    assert "--dashboard needs the master on this machine" in capsys.readouterr().err
