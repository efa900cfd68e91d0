"""What a process may compute with: cores and GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from elasticcb.process.cores import usable_cores

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
# Else TensorFlow and JAX take nearly all memory of a GPU at once: another worker, the process whose place it takes, or
# the program that has started it would be left with none.
SHARED_GPU = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"  # TensorFlow reads it when it first computes
_OF_JAX = "NPROC"  # as JAX does this one


def limit_threads(environment: MutableMapping[str, str], sharing: int = 1) -> None:
    """Lets TensorFlow, and JAX, compute with as many threads as this process may use cores, unless the user has set a
    number.

    They would start a thread for each core of the machine, which then wait for each other: they do not
    know what a container, or a cgroup, may use.

    Args:
        environment: of the process to be limited: this one, or one that it starts.
        sharing: how many processes share the cores.
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
