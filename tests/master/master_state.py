"""Masters for tests in which nothing else runs."""

from __future__ import annotations

import time
from typing import Any

from elasticcb.master.job_machine import JobMachine
from elasticcb.master.master import Master
from elasticcb.master.task import Answer
from elasticcb.settings import ClusterSettings, Command, JobSettings, ModelSettings


def settings_of(command: Command = Command.TRAIN, name: str = "job", **cluster: Any) -> JobSettings:
    """The settings of a job that no test carries out."""
    model = ModelSettings(zoo="/nowhere", definition="model.custom_model")
    return JobSettings(
        command=command, name=name, directory="/nowhere", model=model, cluster=ClusterSettings(**cluster)
    )


def state_of(master: Master) -> JobMachine:
    """What the lock guards; nobody else may use the master meanwhile."""
    with master.server.state() as state:
        return state


def report_progress(master: Master, worker: int, lease: int, done: int, **progress: Any) -> Answer:
    with master.server.state() as state:
        return state.report_progress(worker, lease, time.monotonic(), done, **progress)
