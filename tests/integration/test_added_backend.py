"""A cluster backend that an installed package brings: one file and its entry point."""

import os
import textwrap

import pytest

from jobs import LINEAR_MODEL, linear_data, train_flags, write_model_file

SUBMIT = """\
#!/bin/sh
log=$1; shift
setsid "$@" >>"$log" 2>&1 </dev/null &
echo $!
"""

BACKEND = '''
"""Processes that a script starts, as a batch system has one."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from elasticcb.cluster.base import ClusterBackend, Exit
from elasticcb.cluster.role import RoleProcess


class BatchCluster(ClusterBackend):
    name = "batch"
    summary = "jobs of a batch system"

    def __init__(self, context):
        super().__init__(context)
        self._logs = Path(context.directory, "logs")
        self._watches = {}

    @classmethod
    def mistakes(cls, given):
        if given["num_workers"] > 8:
            yield f"{given.shown('num_workers')}: the queue takes 8."

    def start(self, role, index, master_address):
        process = RoleProcess(role=role, master=master_address, index=index, access=self.access)
        command = [sys.executable, "-m", "elasticcb", *process.arguments]
        log = self._logs / f"{role}-{index}.log"
        submitted = subprocess.run(
            [Path(__file__).with_name("submit.sh"), log, *command],
            env=os.environ | process.environment(self.context.log_level),
            stdout=subprocess.PIPE,
            check=True,
        )
        self._watches[process.place] = os.pidfd_open(int(submitted.stdout))

    def poll(self):
        ended = [place for place, watch in self._watches.items() if select.select([watch], [], [], 0)[0]]
        for place in ended:
            os.close(self._watches.pop(place))
        return [Exit(*place, 0, "its job ended", False) for place in ended]

    def kill(self, role, index):
        watch = self._watches.pop((role, index), None)
        if watch is not None:
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            select.select([watch], [], [])
            os.close(watch)

    def stop(self, grace_seconds):
        for place in list(self._watches):
            self.kill(*place)
'''


@pytest.fixture
def with_backend(tmp_path, monkeypatch):
    """What `pip install` of a package with the backend leaves."""
    site = tmp_path / "site"
    (site / "batch-1.0.dist-info").mkdir(parents=True)
    (site / "batch-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: batch\nVersion: 1.0\n")
    entry = "[elasticcb.clusters]\nbatch = batch_cluster:BatchCluster\nbroken = no_such_module:Cluster\n"
    (site / "batch-1.0.dist-info" / "entry_points.txt").write_text(entry)
    (site / "batch_cluster.py").write_text(textwrap.dedent(BACKEND))
    (site / "submit.sh").write_text(SUBMIT)
    (site / "submit.sh").chmod(0o755)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), before])))
    return site


@pytest.fixture
def flags(tmp_path):
    write_model_file(tmp_path, LINEAR_MODEL, "linear")
    linear_data(tmp_path, train=400, test=80)
    return train_flags(tmp_path, "linear", cluster="batch", num_workers=1)


def test_a_backend_of_another_package_is_in_the_help_and_checks_settings(with_backend, start_job, flags):
    shown = start_job("train", "--help", warm=False)
    assert shown.finish() == 0
    help_text = " ".join(shown.output.split())
    assert "|batch" in help_text.replace(" ", "")
    assert "jobs of a batch system" in help_text.replace("│ ", "")
    assert "The cluster 'broken' (no_such_module:Cluster) can't be used" in help_text
    refused = start_job("train", *flags, "--num_workers=9", warm=False)
    assert refused.finish() == 2
    assert "--num_workers=9: the queue takes 8." in refused.output


@pytest.mark.deep
def test_a_job_runs_on_a_backend_of_another_package(with_backend, tmp_path, start_job, flags):
    job = start_job("train", *flags, warm=False)
    assert job.finish() == 0, job.output
    job.assert_no_orphans()
    assert all((tmp_path / "job" / "logs" / f"{place}.log").stat().st_size for place in ("ps-0", "worker-0"))
