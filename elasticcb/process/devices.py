"""What a process may compute with: cores and GPUs."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from elasticcb.process.cores import usable_cores

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
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


def visible_gpus() -> list[str]:
    """The ids of the NVIDIA GPUs that this process may use."""
    allowed = os.environ.get(GPUS_VARIABLE)
    if allowed is not None:
        return [gpu for gpu in allowed.split(",") if gpu and gpu != "-1"]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []
