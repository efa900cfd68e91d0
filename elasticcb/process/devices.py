"""Devices of a process: cores and GPUs."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from elasticcb.process.cores import usable_cores

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
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


def visible_gpus() -> list[str]:
    """The ids of the NVIDIA GPUs that this process may use."""
    allowed = os.environ.get(GPUS_VARIABLE)
    if allowed is not None:
        return [gpu for gpu in allowed.split(",") if gpu and gpu != "-1"]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []
