"""Commands about a job of this machine whose master is gone."""

import contextlib
import json
import re
import socket
from types import SimpleNamespace

import pytest

from elasticcb.cli.main import main
from elasticcb.clients import local_job
from elasticcb.clients.running_master import MASTER_FILE, RunningMaster
from elasticcb.errors import UsageError
from elasticcb.settings import JOB_FILE, JOURNAL_FILE, STATUS_FILE
from elasticcb.storage import durable


@pytest.mark.parametrize("command", ["status", "stop", "table"])
@pytest.mark.parametrize(
    ("trains", "advice"), [(True, "`elasticcb resume {}` resumes the job"), (False, "start it again")]
)
def test_who_asks_a_killed_master_is_told_how_to_go_on(tmp_path, monkeypatch, capsys, command, trains, advice):
    monkeypatch.setattr(local_job, "_PATIENCE_SECONDS", 0.1)
    with socket.socket() as bound:  # and listens to nobody
        bound.bind(("127.0.0.1", 0))
        gone = RunningMaster(f"127.0.0.1:{bound.getsockname()[1]}", "token", None)
        (tmp_path / MASTER_FILE).write_text(json.dumps(gone._asdict()))
        if trains:
            (tmp_path / JOB_FILE).write_text("{}")
            (tmp_path / JOURNAL_FILE).write_text("")
        assert main([command, str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "does not answer" in message
    assert f"If it was killed, {advice.format(tmp_path)}" in message
    assert trains or "resume" not in message


@pytest.mark.parametrize("command", ["status", "stop", "table", "resume"])
@pytest.mark.parametrize("holds", ["logs/zygote.log", "fit-1/fit.json"])
def test_who_asks_about_the_folder_of_a_cluster_is_told_who_shows_its_progress(tmp_path, capsys, command, holds):
    (tmp_path / holds).parent.mkdir()
    (tmp_path / holds).write_text("{}")
    assert main([command, str(tmp_path)]) == 2
    assert f"{tmp_path} belongs to an elasticcb.Cluster, and its Python program does not run" in capsys.readouterr().err


def test_a_program_that_has_ended_is_told_from_a_job(tmp_path, monkeypatch, capsys):
    logs = tmp_path / "jobs" / "mine" / "logs"
    logs.mkdir(parents=True)
    (logs / "zygote.log").write_text("")
    (logs / "master.log").write_text("one\ntwo\n")
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "mine", "--lines=1"]) == 0
    assert capsys.readouterr().out == "two\n"
    for command in ("resume", "status"):
        assert main([command, "mine"]) == 2
        assert "Run the program again to resume a `fit`" in capsys.readouterr().err
    assert main(["jobs"]) == 0
    assert re.search(r"^mine +program +ended +[-\d]+ [:\d]+ +- +jobs/mine$", capsys.readouterr().out, re.MULTILINE)


def test_a_job_whose_master_never_started_is_not_taken_for_a_cluster(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    for name in (".command.lock", "logs/zygote.log"):
        (tmp_path / name).write_text("")
    assert main(["status", str(tmp_path)]) == 2
    assert "is not the folder of a running job" in capsys.readouterr().err


def test_a_job_that_ends_before_its_next_master_is_asked_was_stopped(tmp_path, monkeypatch):
    asked = []

    @contextlib.contextmanager
    def master_of(folder, start_seconds):
        asked.append(folder)
        if len(asked) == 2:  # after the first one was killed, another one has ended the job
            durable.write_document(folder / STATUS_FILE, {"phase": "interrupted", "error": "Interrupted at version 3."})
            raise UsageError("It has ended.")
        yield SimpleNamespace(stop=lambda: (1, "here"))

    monkeypatch.setattr(local_job, "master_of", master_of)
    assert local_job.stop_job(tmp_path, 60.0) == "Interrupted at version 3."
    assert len(asked) == 2
