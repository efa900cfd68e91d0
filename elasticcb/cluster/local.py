"""Workers and parameter servers as processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from elasticcb.cluster.base import ClusterBackend, Exit
from elasticcb.rpc import TOKEN_VARIABLE

logger = logging.getLogger(__name__)

# glibc gives every large block back to the kernel, and each tensor then pays for page faults: these
# keep blocks in the process, which doubles the steps per second.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}


class LocalCluster(ClusterBackend):
    """Child processes that end with this one, however it ends.

    Args:
        directory: the job's; logs go to `logs/ROLE-INDEX.log` below it.
        log_level: TensorFlow's own messages are kept quiet unless this is DEBUG.
    """

    def __init__(self, directory: str, log_level: str = "INFO") -> None:
        self._logs = Path(directory) / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._quiet = log_level != "DEBUG"
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._gpus = visible_gpus()

    def start(self, role: str, index: int, master_address: str) -> None:
        command = [sys.executable, "-m", "elasticcb", role, "--master", master_address]
        command += ["--index", str(index), "--parent_pid", str(os.getpid())]
        self.kill(role, index)  # one that has said goodbye, and is still there
        with self._open_log(role, index) as log:
            # A session of its own: Ctrl-C reaches the master alone, which then ends the others in order.
            self._processes[role, index] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(role, index),
                start_new_session=True,
            )

    def pid(self, role: str, index: int) -> int:
        """The id of the process in a place. Raises `KeyError` when there is none."""
        return self._processes[role, index].pid

    def poll(self) -> list[Exit]:
        ended = [(place, process) for place, process in self._processes.items() if process.poll() is not None]
        exits = []
        for (role, index), process in ended:
            del self._processes[role, index]
            code = process.returncode
            reason = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            exits.append(Exit(role, index, process.pid, reason, code > 0, str(self._log_path(role, index))))
        return exits

    def kill(self, role: str, index: int) -> None:
        process = self._processes.pop((role, index), None)
        if process is not None:
            process.kill()
            process.wait()

    def stop(self, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        processes = list(self._processes.values())
        self._processes.clear()
        try:
            for process in processes:
                process.terminate()
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also when the user interrupts the wait
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        try:
            text = self._log_path(role, index).read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _log_path(self, role: str, index: int) -> Path:
        return self._logs / f"{role}-{index}.log"

    def _open_log(self, role: str, index: int) -> IO[bytes]:
        return self._log_path(role, index).open("ab")

    def _environment(self, role: str, index: int) -> dict[str, str]:
        environment = _ALLOCATOR | {"PYTHONUNBUFFERED": "1", TOKEN_VARIABLE: self.token}
        if self._quiet:
            environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
        if self._gpus:
            # One GPU per worker; servers would only take memory from them.
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[index % len(self._gpus)] if role == "worker" else "-1"
        return os.environ | environment


def visible_gpus() -> list[str]:
    """The ids of the NVIDIA GPUs that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [gpu for gpu in allowed.split(",") if gpu and gpu != "-1"]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []


def follow_parent(parent_pid: int) -> None:
    """Makes this process end when its parent does, even by SIGKILL.

    Call it before anything slow. A parent that is gone already ends the process here.
    """
    if os.getppid() != parent_pid:
        os._exit(1)
    # Not by prctl(PR_SET_PDEATHSIG): that is sent when the thread ends which started this process.
    threading.Thread(target=_watch_parent, args=(parent_pid,), name="parent", daemon=True).start()


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)
