"""docs/slurm.md: its script runs on Slurm's own daemons, on one node, this machine."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import free_port
from waiting import wait_until

from code_blocks import code_blocks
from jobs import GATE, LINEAR_MODEL, linear_data, open_gate, write_model_file

ROOT = Path(__file__).parents[2]
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A controller and a node with four CPUs; the environment names them."""
    if not all(shutil.which(name, path=PATH) for name in ("slurmctld", "slurmd", "sbatch")):
        pytest.skip("Slurm is not installed (Debian: apt-get install slurm-wlm)")
    if os.geteuid():
        pytest.skip("only root may start slurmd")
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    (folder / "spool").mkdir()
    values = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder}
    text = CONFIGURATION.format(port=free_port(), node_port=free_port(), **values)
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("PATH", PATH)
    with contextlib.ExitStack() as stack:
        for daemon in ("slurmctld", "slurmd"):
            log = stack.enter_context((folder / f"{daemon}.log").open("w"))
            process = subprocess.Popen([daemon, "-D"], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        yield


def run(*command: str, folder: Path) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def workers_that_train(job: Path) -> set[int]:
    """Their pids, by the job's status, once there are records."""
    command = [sys.executable, "-m", "elasticcb", "status", str(job), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    status = json.loads(shown.stdout) if shown.returncode == 0 else {"records_trained": 0}
    if not status["records_trained"]:
        return set()
    return {each["pid"] for each in status["processes"] if each["role"] == "worker" and each["state"] == "up"}


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_script_of_the_page_trains_on_slurm_and_starts_a_lost_worker_again(
    slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model_file(tmp_path, LINEAR_MODEL + GATE.format(version=100), "linear")
    linear_data(tmp_path, train=1_200, test=200)
    (tmp_path / "job.yaml").write_text(
        "model_zoo: .\nmodel_def: linear.custom_model\ntraining_data: train.npz\nvalidation_data: test.npz\n"
        "num_epochs: 2\nminibatch_size: 8\nsilence_seconds: 5\n"
    )
    (script,) = code_blocks(ROOT / "docs" / "slurm.md", "sh")
    assert "sleep 40" in script
    (tmp_path / "train.sbatch").write_text(script.replace("sleep 40", "sleep 8"))
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "elasticcb").write_text(f'#!/bin/sh\nexec {sys.executable} -m elasticcb "$@"\n')
    (commands / "elasticcb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{PATH}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    number = run("sbatch", "--parsable", "train.sbatch", folder=tmp_path).strip()
    job = tmp_path / "jobs" / f"clicks-{number}"
    wait_until(lambda: len(workers_that_train(job)) == 2)
    pids = workers_that_train(job)
    os.kill(min(pids), signal.SIGKILL)
    wait_until(lambda: workers_that_train(job) - pids)
    open_gate(tmp_path)
    wait_until(lambda: not run("squeue", "--noheader", f"--jobs={number}", folder=tmp_path).strip())
    printed = (tmp_path / f"slurm-{number}.out").read_text()
    assert "JobState=COMPLETED" in run("scontrol", "show", "job", number, folder=tmp_path), printed
    assert re.search(r"records trained +2,400 \(2 epochs of 1,200\)", printed), printed
    assert re.search(r"workers lost +1 \(1 replaced\)", printed), printed
