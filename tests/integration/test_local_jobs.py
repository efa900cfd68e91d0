"""`elasticcb stop` and `logs` for jobs of this machine."""

import re
import threading
from pathlib import Path

import pytest
from waiting import wait_until

from elasticcb.cli.main import main
from elasticcb.clients.running_master import is_starting
from jobs import GATE, LINEAR_MODEL, linear_data, number, open_gate, train_flags, write_model_file


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A model whose workers wait at version 10, with data, in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_model_file(tmp_path, LINEAR_MODEL + GATE.format(version=10), "linear")
    linear_data(tmp_path, train=8_000, test=80)
    return tmp_path


@pytest.fixture
def started(data, start_job):
    """A job that trains; its folder has the name of its command."""
    flags = train_flags(data, "linear", checkpoint_dir=data / "checkpoints", num_epochs=50)
    job = start_job("train", *(flag for flag in flags if not flag.startswith("--job_dir")))
    job.wait_for_line(r"training: .*workers 2/2")
    return job


def test_a_job_is_stopped_by_its_name_and_goes_on_later(data, started, start_job, capsys):
    first = re.fullmatch(r"\[linear\] The job's folder is (.+)", started.lines[0])
    assert first
    name = first[1].rpartition("/")[2]
    assert re.fullmatch(r"train-linear-\d{8}-\d{6}", name)

    def read_logs():
        codes.append(main(["logs", name, "--worker=1", "--follow"]))

    codes = []
    logs = threading.Thread(target=read_logs)
    logs.start()
    assert main(["stop", name, "--timeout=0.001"]) == 1  # workers wait at their gate
    master = started.master
    open_gate(data)
    assert main(["stop", name]) == 0
    logs.join()
    captured = capsys.readouterr()
    assert f"`kill {master.pid}` on" in captured.err
    assert "The job was interrupted at version" in captured.out
    assert f"elasticcb resume {first[1]}" in captured.out
    assert codes == [0]
    assert "TensorFlow is imported" in captured.out
    assert started.finish() == 130, started.output
    assert "Interrupted: finishing running tasks" in started.output
    started.assert_no_orphans()

    assert main(["stop", name]) == 2
    assert "The job has ended: `elasticcb status" in capsys.readouterr().err
    assert main(["status", "latest"]) == 0
    assert "interrupted" in capsys.readouterr().out
    assert main(["logs", "latest", "--master", "--lines=1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["logs", "latest", "--ps=7"]) == 2
    assert "no log of ps-7; logs: master, ps-0, worker-0, worker-1" in capsys.readouterr().err

    resumed = start_job("resume", first[1])
    wait_until(lambda: is_starting(Path(first[1])))
    assert main(["stop", "latest"]) == 0
    captured = capsys.readouterr()
    assert "is starting" in captured.err
    assert "interrupted" in captured.out
    assert resumed.finish() == 130, resumed.output
    resumed.assert_no_orphans()


@pytest.mark.deep  # tests/cli/test_local_job.py has what the command does then
def test_a_master_that_is_killed_while_it_stops_is_stopped_again(data, started, capsys):
    stopped = []
    thread = threading.Thread(target=lambda: stopped.append(main(["stop", "latest"])))
    thread.start()
    started.wait_for_line("Interrupted: finishing")
    started.master.kill()
    started.wait_for_line("a new one continues the job")
    thread.join()
    assert stopped == [0], capsys.readouterr().err
    assert started.finish() == 130, started.output
    assert number(started.output, "interrupted at version") >= 0
    started.assert_no_orphans()
