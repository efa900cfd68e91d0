"""A new job in the folder of an earlier one, which may be one that can be resumed."""

import json
from dataclasses import replace

import pytest

from elasticcb.cli.job import refuse_unfinished
from elasticcb.cli.main import main
from elasticcb.clients.running_master import command_runs
from elasticcb.errors import UsageError
from elasticcb.master.journal import Journal
from elasticcb.roles.master import _journal
from elasticcb.settings import (
    HISTORY_FILE,
    JOB_FILE,
    JOURNAL_FILE,
    STATUS_FILE,
    CheckpointSettings,
    Command,
    JobSettings,
)
from elasticcb.storage import durable

QUEUE = {"training": [["a", 8]]}


def write_journal(folder, **entry):
    journal = Journal(folder / JOURNAL_FILE)
    journal.add(**entry)
    journal.close()


@pytest.mark.parametrize("command", list(Command))
def test_no_command_replaces_a_job_that_has_not_finished(tmp_path, command):
    write_journal(tmp_path, queue=QUEUE, version=7)
    with pytest.raises(UsageError, match="has not finished, at version 7"):
        refuse_unfinished(JobSettings(command=command, directory=str(tmp_path)))


def test_a_journal_that_can_be_repaired_is_not_replaced(tmp_path):
    write_journal(tmp_path, queue=QUEUE, version=7)
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes().replace(b'"version":7', b'"version":8'))
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is damaged from byte"):
        refuse_unfinished(JobSettings(command=Command.TRAIN, directory=str(tmp_path)))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "entry", [{"queue": QUEUE, "version": 7, "over": True}, {"queue": QUEUE}, {"run": "ended before its first task"}]
)
def test_a_job_that_can_not_be_resumed_is_replaced(tmp_path, entry):
    refuse_unfinished(JobSettings(command=Command.TRAIN, directory=str(tmp_path)))  # there is none
    write_journal(tmp_path, **entry)
    refuse_unfinished(JobSettings(command=Command.TRAIN, directory=str(tmp_path)))
    (tmp_path / JOURNAL_FILE).write_bytes(b"")
    refuse_unfinished(JobSettings(command=Command.TRAIN, directory=str(tmp_path)))


@pytest.mark.parametrize("interval", [0.0, 10.0])
def test_nothing_of_an_earlier_job_is_resumed_or_shown_after_a_new_one_has_begun(tmp_path, capsys, interval):
    earlier = JobSettings(command=Command.TRAIN, directory=str(tmp_path))
    earlier = replace(earlier, checkpoint=CheckpointSettings(directory=str(tmp_path / "earlier")))
    durable.write_document(tmp_path / JOB_FILE, json.loads(earlier.to_json()))
    durable.write_document(tmp_path / HISTORY_FILE, {"number": 7})
    write_journal(tmp_path, queue=QUEUE, version=7, over=True)
    new = replace(earlier, checkpoint=CheckpointSettings(interval_seconds=interval, directory=str(tmp_path / "new")))
    with command_runs(tmp_path):
        journal = _journal(new, resumed=False, say=pytest.fail)()
    if journal is not None:
        journal.close()
    assert (journal is None) == (not interval)
    assert not (tmp_path / HISTORY_FILE).exists()

    assert main(["status", str(tmp_path)]) == 2
    assert ("resumes it" if interval else "Start it again") in capsys.readouterr().err
    durable.write_document(tmp_path / STATUS_FILE, {"phase": "failed"})
    assert main(["table", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert f"no complete checkpoint in {tmp_path / 'new'}" in message
    if not interval:
        assert main(["resume", str(tmp_path)]) == 2
        assert "the job ran with --checkpoint_interval=0, so there is nothing to resume" in capsys.readouterr().err


def test_a_job_that_is_resumed_keeps_its_settings_and_its_history(tmp_path):
    settings = JobSettings(command=Command.TRAIN, directory=str(tmp_path))
    _journal(settings, resumed=False, say=pytest.fail)().close()
    write_journal(tmp_path, queue=QUEUE, version=7)
    durable.write_document(tmp_path / HISTORY_FILE, {"number": 7})
    before = (tmp_path / JOB_FILE).read_bytes()
    journal = _journal(replace(settings, name="other"), resumed=True, say=pytest.fail)()
    assert journal.memory.version == 7
    journal.close()
    assert (tmp_path / JOB_FILE).read_bytes() == before
    assert (tmp_path / HISTORY_FILE).exists()


def test_a_job_that_evaluates_has_no_files_to_be_resumed_from(tmp_path):
    assert (
        _journal(JobSettings(command=Command.EVALUATE, directory=str(tmp_path)), resumed=False, say=pytest.fail) is None
    )
