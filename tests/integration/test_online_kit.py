"""The folder that `elasticcb zoo new online` makes: its README, command by command, with more clicks in less time."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from elasticcb.cli.main import main
from jobs import JobProcess
from warm import WarmProcess

pytestmark = pytest.mark.deep


@pytest.mark.timeout(300)
def test_served_model_learns_from_clicks_that_one_trained_once_does_not_see(tmp_path, monkeypatch, start_job):
    monkeypatch.chdir(tmp_path)
    assert main(["zoo", "new", "online"]) == 0
    folder = tmp_path / "online"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        kafka = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "KAFKA": kafka}
    started = []

    def script(name, *arguments):
        errors = folder / f"{name}.errors"
        started.append(WarmProcess([*arguments], folder, environment, folder / name, stderr=errors))
        return started[-1]

    try:
        assert kafka in script("broker.py").stdout.readline()
        assert "Sending 1000 clicks" in script("producer.py", "1000").stdout.readline()
        job = start_job("train", "--config=train.yaml", f"--training_data=kafka://{kafka}/clicks", cwd=folder)
        served: JobProcess = start_job("serve", "exports", "--port=0", cwd=folder)
        line = served.wait_for_line(r"^http://.*/exports$")
        environment["SERVED"] = re.search(r"//([^/]+)/", line)[1]
        compared = script("compare.py", "75")
        lines = re.findall(r"AUC ([.\d]+) of the served model, ([.\d]+) of the fixed one", compared.stdout.read())
        assert compared.wait() == 0, (folder / "compare.py.errors").read_text()
        follows, stays = map(float, lines[-1])
        assert follows > 0.7, job.output
        assert follows > stays + 0.1
        assert (folder / "compare.png").stat().st_size > 1000
        for each in (served, job):
            each.process.send_signal(signal.SIGINT)
        assert served.finish() == 0, served.output
        job.finish()
        assert "elasticcb resume" in job.output
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
            process.wait(30)
