"""Ctrl-C and SIGTERM at a command whose job has not begun."""

import signal

import pytest

from elasticcb.cli import job
from elasticcb.cli.main import main
from elasticcb.clients.running_master import MASTER_FILE
from elasticcb.cluster.local.backend import LocalCluster
from elasticcb.storage import durable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def handlers(monkeypatch):
    """As in a process of its own, whatever started the tests."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr("elasticcb.process.signals._told_at", -60.0)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "place"), [(signal.SIGINT, "validate"), (signal.SIGTERM, "show_header"), (signal.SIGINT, "run_master")]
)
def test_a_command_that_is_interrupted_before_its_job_begins_says_so(
    workplace, handlers, monkeypatch, capsys, number, place
):
    def interrupted(*given):
        signal.raise_signal(number)

    monkeypatch.setattr(LocalCluster if place == "run_master" else job, place, interrupted)
    assert main(["train", *workplace.train, "--job_dir=job"]) == 130
    assert "before the job began" in capsys.readouterr().err
    assert main(["status", "job"]) == 2


def test_a_job_that_has_begun_is_not_said_to_have_not(workplace, handlers, monkeypatch, capsys):
    def interrupted(run):
        durable.write_document(workplace.root / "job" / MASTER_FILE, {})  # of a master that is killed then
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(LocalCluster, "run_master", interrupted)
    assert main(["train", *workplace.train, "--job_dir=job"]) == 130
    assert capsys.readouterr().err.strip() == "Interrupted."
