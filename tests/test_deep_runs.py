"""Long runs by chance, each a program of its own: walks, broken messages, killed processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNS = {
    "walks of the task queue": ["tests/master/task_queue_walks.py", "--minutes=1"],
    "broken messages": ["tests/fuzzing/fuzz.py", "--minutes=1"],
    "processes that are killed": ["benchmarks/chaos.py", "--every", "10", "--epochs", "12"],
}


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", RUNS)
def test_long_run_finds_nothing(run, tmp_path):
    command = [sys.executable, *(str(ROOT / part) if part.endswith(".py") else part for part in RUNS[run])]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
