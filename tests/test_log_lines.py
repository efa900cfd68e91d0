"""The lines that processes log."""

import datetime
import json
import logging
import time

import pytest

from elasticcb.process.log_files import LogFile
from elasticcb.process.logs import FORMAT_VARIABLE, setup_logging


@pytest.fixture
def log_lines(tmp_path, monkeypatch):
    """Logs one line and an error, and gives what is in the file; this machine is far from Greenwich."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    loggers = [logging.getLogger(name) for name in ("elasticcb", "py.warnings")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]

    def log():
        setup_logging("ps-1", "INFO", LogFile(str(tmp_path / "log")))
        logging.getLogger("elasticcb.test").info("It %s", "begins")
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("elasticcb.test").exception("It ends")
        return (tmp_path / "log").read_text().splitlines()

    yield log
    logging.captureWarnings(False)
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)
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
