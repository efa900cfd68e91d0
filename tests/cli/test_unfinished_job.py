"""A new job in the folder of one that can be resumed."""

import pytest

from elasticcb.cli.job import refuse_unfinished
from elasticcb.errors import UsageError
from elasticcb.master.journal import Journal
from elasticcb.settings import JOURNAL_FILE, Command, JobSettings

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
