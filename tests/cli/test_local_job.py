"""Commands about a job of this machine whose master is gone."""

import json
import socket

import pytest

from elasticcb.cli import local_job
from elasticcb.cli.main import main
from elasticcb.clients.running_master import MASTER_FILE, RunningMaster
from elasticcb.settings import JOB_FILE


@pytest.mark.parametrize("command", ["status", "stop"])
@pytest.mark.parametrize(("trains", "advice"), [(True, "`elasticcb resume {}` goes on"), (False, "start it again")])
def test_who_asks_a_killed_master_is_told_how_to_go_on(tmp_path, monkeypatch, capsys, command, trains, advice):
    monkeypatch.setattr(local_job, "_PATIENCE_SECONDS", 0.1)
    with socket.socket() as bound:  # and listens to nobody
        bound.bind(("127.0.0.1", 0))
        gone = RunningMaster(f"127.0.0.1:{bound.getsockname()[1]}", "token", None)
        (tmp_path / MASTER_FILE).write_text(json.dumps(gone._asdict()))
        if trains:
            (tmp_path / JOB_FILE).write_text("{}")
        assert main([command, str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "does not answer" in message
    assert f"If it was killed, {advice.format(tmp_path)}" in message
    assert trains or "resume" not in message
