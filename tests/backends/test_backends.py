"""What holds on every backend, shown on each: the files of `conformance/` run in a process whose Keras is on it.

One of them by hand: `KERAS_BACKEND=jax python -m pytest tests/backends/conformance/check_steps.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CONFORMANCE = Path(__file__).parent / "conformance"
# By the package that it needs, how to install that.
BACKENDS = {"jax": "pip install 'elasticcb[jax]'", "torch": "pip install torch"}


def require(backend: str) -> None:
    """Skips a test where a backend is not installed."""
    if find_spec(backend) is None:
        pytest.skip(f"the package {backend!r} is not installed: {BACKENDS[backend]}")


def run(backend: str, *options: str) -> None:
    """Runs the checks, and shows what fails."""
    require(backend)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    # What JAX compiles runs a few times here. Deep checks run it as users do, optimized.
    quick = {} if "deep" in options else {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = os.environ | quick | {"KERAS_BACKEND": backend}
    files = [CONFORMANCE / f"check_{part}.py" for part in ("steps", "rounds", "tables", "jobs", backend)]
    done = subprocess.run(
        [*command, *(str(file) for file in files if file.exists())],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_tables_and_jobs_are_those_of_keras(backend):
    run(backend)


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_that_holds_on_every_backend(backend):
    run(backend, "-m", "deep")


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_the_checks_hold_on_tensorflow_too():
    run("tensorflow", "-k", "check_rounds or (check_steps and not tensors)")
