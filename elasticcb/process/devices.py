"""Devices of a process: cores and GPUs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 30


def usable_cores(proc: Path = Path("/proc/self")) -> int:
    """At least 1. A quota of one and a half cores counts as two.

    The quota may be set on the process's own group or any parent: of a container, a systemd unit, or a batch job.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not Linux
        for folder in _groups(proc):
            cores = min(cores, _quota(folder))
    return max(1, cores)


def _groups(proc: Path) -> Iterator[Path]:
    """Folders of the groups that limit the CPU time of the process, in both versions of control groups."""
    groups: dict[str, PurePosixPath] = {}  # by controllers; "": version 2
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups[controllers] = PurePosixPath(path)
    for line in (proc / "mountinfo").read_text().splitlines():
        # https://www.kernel.org/doc/html/latest/filesystems/proc.html#proc-pid-mountinfo-information-about-mounts
        place, _, kind = line.partition(" - ")
        _, _, _, root, mount_point, *_ = place.split()
        for controllers, group in groups.items():
            if _holds(kind, controllers):
                # A container sees its own group as the root, and its path may be valid only on the host.
                inner = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
                yield from (Path(mount_point, folder) for folder in (inner, *inner.parents))


def _holds(kind: str, controllers: str) -> bool:
    """Whether a mount of this type has the groups of `controllers`, and they limit CPU time."""
    system, _, options = kind.split(" ", 2)
    if not controllers:
        return system == "cgroup2"
    return system == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(",")


def _quota(folder: Path) -> int:
    """In whole cores."""
    with contextlib.suppress(OSError):
        quota, period = (folder / "cpu.max").read_text().split()
        return _UNLIMITED if quota == "max" else math.ceil(int(quota) / int(period))
    with contextlib.suppress(OSError):
        quota = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:
            return math.ceil(int(quota) / int(period))
    return _UNLIMITED


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
