from pathlib import Path

import pytest

from jobs import JobProcess


@pytest.fixture
def start_job(tmp_path):
    """Starts `elasticcb …` in `tmp_path`; whatever is left of it is killed at the end."""
    started: list[JobProcess] = []

    def start(*arguments: str, cwd: Path = tmp_path) -> JobProcess:
        job = JobProcess(*arguments, cwd=cwd)
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
