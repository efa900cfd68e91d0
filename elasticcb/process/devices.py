"""Devices of a process: cores and GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from elasticcb.process.cores import usable_cores

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
# By default TensorFlow and JAX reserve nearly all memory of a GPU: nothing would be left for another worker, a
# replacement, or the program that started the workers.
SHARED_GPU = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"  # TensorFlow reads it before its first computation
_OF_JAX = "NPROC"  # like JAX reads this one


def limit_threads(environment: MutableMapping[str, str], sharing: int = 1) -> None:
    """Limits the threads of TensorFlow and JAX to the cores that this process may use, unless the user has set a
    number.

    Otherwise, they start a thread for each core of the machine, because they don't respect limits of containers or
    cgroups, and the threads wait for each other.

    Args:
        environment: environment of the process to limit: this one, or one that it starts.
        sharing: number of processes that share the cores.
    """
    if THREADS_VARIABLE not in environment:
        environment[THREADS_VARIABLE] = str(max(1, usable_cores() // max(1, sharing)))
    environment.setdefault(_OF_JAX, environment[THREADS_VARIABLE])


def hide_gpus(environment: MutableMapping[str, str]) -> None:
    """Lets a process see no GPU, if it has not looked for any yet."""
    environment[GPUS_VARIABLE] = "-1"


@contextlib.contextmanager
def gpus_hidden() -> Iterator[None]:
    """Within it this process finds no GPU."""
    before = os.environ.get(GPUS_VARIABLE)
    hide_gpus(os.environ)
    try:
        yield
    finally:
        del os.environ[GPUS_VARIABLE]
        if before is not None:
            os.environ[GPUS_VARIABLE] = before


def visible_gpus() -> list[str]:
    """The ids of the NVIDIA GPUs that this process may use."""
    allowed = os.environ.get(GPUS_VARIABLE)
    if allowed is not None:
        return [gpu for gpu in allowed.split(",") if gpu and gpu != "-1"]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []
