from pathlib import Path

import pytest
from faults import Faults

from jobs import JobProcess
from warm import warm_clusters


@pytest.fixture(scope="module", autouse=True)
def _warm_clusters():
    with warm_clusters():
        yield


@pytest.fixture
def start_job(tmp_path):
    """Starts `elasticcb …` in `tmp_path`; whatever is left of it is killed at the end."""
    started: list[JobProcess] = []

    def start(*arguments: str, cwd: Path = tmp_path, warm: bool = True) -> JobProcess:
        job = JobProcess(*arguments, cwd=cwd, warm=warm)
        started.append(job)
        return job

    yield start
    for job in started:
        for process in [*job.family, job.process]:
            try:
                process.kill()
            except Exception:  # it is gone
                continue
        job.process.wait()


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """What is to go wrong in the jobs that the test starts."""
    faults = Faults(tmp_path / "faults")
    for name, value in faults.environment.items():
        monkeypatch.setenv(name, value)
    return faults
