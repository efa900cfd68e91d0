"""The state of a master's job for tests in which nothing else runs."""

from __future__ import annotations

from elasticcb.master.job_state import JobState
from elasticcb.master.master import Master


def state_of(master: Master) -> JobState:
    """What the lock guards; nobody else may use the master meanwhile."""
    with master.desk.state() as state:
        return state
