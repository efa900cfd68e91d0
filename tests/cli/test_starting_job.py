"""Commands about a job whose master is not up yet: they wait for it, whatever is written of one before it."""

import json
import os

import pytest

from elasticcb.cli.main import main
from elasticcb.clients import local_job
from elasticcb.clients.local_job import how_it_ended
from elasticcb.clients.running_master import (
    MASTER_FILE,
    RunningMaster,
    command_runs,
    has_command,
    has_ended,
    holds_job,
    is_starting,
    published,
)
from elasticcb.errors import UsageError
from elasticcb.security.credentials import Access
from elasticcb.settings import STATUS_FILE
from elasticcb.storage import durable

NEW = RunningMaster.of("localhost:1", Access("token"), "", "")


@pytest.fixture
def ended(tmp_path):
    """The folder of a job that was interrupted, whose master was killed then."""
    durable.write_document(tmp_path / STATUS_FILE, {"phase": "interrupted", "error": "Interrupted at version 3."})
    (tmp_path / MASTER_FILE).write_text(json.dumps(RunningMaster("localhost:9", "old", None)._asdict()))
    for name in (STATUS_FILE, MASTER_FILE):
        os.utime(tmp_path / name, (1, 1))
    return tmp_path


def test_a_job_is_starting_from_its_command_until_its_master_is_up(ended):
    assert not is_starting(ended)
    with command_runs(ended):
        assert is_starting(ended)
        assert how_it_ended(ended) is None
        with published(ended, NEW):
            assert not is_starting(ended)
    assert not is_starting(ended)
    assert not has_command(ended)


def test_a_job_that_has_just_ended_is_not_starting(ended):
    with command_runs(ended):
        durable.write_document(ended / STATUS_FILE, {"phase": "done"})
        assert how_it_ended(ended) == {"phase": "done"}
        assert not has_ended(ended)  # its processes are about to
    assert has_ended(ended)


def test_a_resume_that_is_refused_leaves_how_the_job_ended(ended):
    with pytest.raises(UsageError), command_runs(ended):
        raise UsageError("refused")
    assert how_it_ended(ended)["error"] == "Interrupted at version 3."


def test_a_new_folder_is_one_of_a_job_as_soon_as_its_command_runs(tmp_path):
    assert not holds_job(tmp_path)
    with command_runs(tmp_path):
        assert holds_job(tmp_path)
        assert is_starting(tmp_path)


def test_a_second_command_in_the_folder_takes_nothing_from_the_first(ended):
    with command_runs(ended):
        with command_runs(ended):
            pass
        assert is_starting(ended)


@pytest.mark.parametrize("command", ["status", "stop", "table", "scale"])
def test_commands_wait_for_the_master_of_a_job_that_is_starting(ended, monkeypatch, capsys, command):
    monkeypatch.setattr(local_job, "_START_SECONDS", 0.0)
    with command_runs(ended):
        if command == "stop":
            assert main(["stop", str(ended), "--timeout=0.01"]) == 2
        elif command == "scale":
            assert main(["scale", str(ended), "--workers=2"]) == 2
        else:
            assert main([command, str(ended)]) == 2
    message = capsys.readouterr().err
    assert f"The job in {ended} is starting." in message
    assert "its master is not up after" in message
    assert "has ended" not in message
