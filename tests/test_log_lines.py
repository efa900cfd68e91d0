"""The lines that processes log."""

import datetime
import json
import logging
import os
import signal
import time

import pytest

from elasticcb.process.host import POD_NAME
from elasticcb.process.log_files import FORMAT_VARIABLE, LogFile, print_line, setup_logging
from elasticcb.roles.master import _begin as begin_master
from elasticcb.settings import Command, JobSettings


@pytest.fixture
def own_loggers():
    """The loggers are as they were, afterwards."""
    loggers = [logging.getLogger(name) for name in ("elasticcb", "py.warnings")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    yield
    logging.captureWarnings(False)
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for handler in each.handlers:
            handler.close()
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.fixture
def log_lines(tmp_path, monkeypatch, own_loggers):
    """Logs one line and an error, and gives what is in the file; this machine is far from Greenwich."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()

    def log():
        setup_logging("ps-1", "INFO", LogFile(str(tmp_path / "log")))
        logging.getLogger("elasticcb.test").info("It %s", "begins")
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("elasticcb.test").exception("It ends")
        return (tmp_path / "log").read_text().splitlines()

    yield log
    monkeypatch.undo()
    time.tzset()


def is_now(stamp):
    at = datetime.datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=datetime.timezone.utc)
    return abs(at.timestamp() - time.time()) < 600


def test_lines_have_the_time_in_utc_and_the_role(log_lines):
    stamp, rest = log_lines()[0].split(" ", 1)
    assert is_now(stamp)
    assert rest == "ps-1 I elasticcb.test: It begins"


def test_lines_are_json_if_that_is_asked_for(log_lines, monkeypatch):
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    first, error = map(json.loads, log_lines())
    assert is_now(first.pop("time"))
    assert first == {"role": "ps-1", "level": "INFO", "logger": "elasticcb.test", "message": "It begins"}
    assert "ValueError: no" in error["traceback"]


@pytest.mark.parametrize("pod", ["job-x7k2p", ""])
def test_the_log_of_a_master_in_a_pod_is_also_its_output(own_loggers, tmp_path, monkeypatch, capsys, pod):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    if pod:
        monkeypatch.setenv(POD_NAME, pod)
    else:
        monkeypatch.delenv(POD_NAME, raising=False)
    begin_master(JobSettings(command=Command.TRAIN, directory=str(tmp_path)))
    logging.getLogger("elasticcb.test").info("It begins")
    line = "master I elasticcb.test: It begins\n"
    assert line in (tmp_path / "logs" / "master.log").read_text()
    assert (line in capsys.readouterr().out) == bool(pod)


def test_what_is_printed_may_find_no_reader(capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        print_line("first", stream)
        print_line("second", stream)
    assert capfd.readouterr().out == ""
