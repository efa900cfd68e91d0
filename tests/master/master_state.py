"""Masters for tests in which nothing else runs."""

from __future__ import annotations

from typing import Any

from elasticcb.master.job_state import JobState
from elasticcb.master.master import Master
from elasticcb.settings import ClusterSettings, Command, JobSettings, ModelSettings


def settings_of(command: Command = Command.TRAIN, name: str = "job", **cluster: Any) -> JobSettings:
    """The settings of a job that no test carries out."""
    model = ModelSettings(zoo="/nowhere", definition="model.custom_model")
    return JobSettings(
        command=command, name=name, directory="/nowhere", model=model, cluster=ClusterSettings(**cluster)
    )


def state_of(master: Master) -> JobState:
    """What the lock guards; nobody else may use the master meanwhile."""
    with master.desk.state() as state:
        return state
