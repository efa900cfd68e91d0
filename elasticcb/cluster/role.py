"""Describes a worker or a parameter server: its command line and environment, which every backend uses to start it, and
which `elasticcb worker` and `elasticcb ps` parse."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from elasticcb.compute.registry import VARIABLE, backend_of_role, chosen_backend
from elasticcb.process.log_files import FORMAT_VARIABLE, quiet_environment
from elasticcb.security.credentials import OPEN, TOKEN_VARIABLE, Access
from elasticcb.security.socket_folder import is_folder
from elasticcb.settings import ClusterSettings
from elasticcb.settings.definition import settings_of

Place = tuple[str, int]  # role and index
_LISTENS = ("host", "port", "health_port")

# TensorFlow's allocator never returns memory, so a large model keeps its peak usage plus fragmentation. glibc returns
# blocks of 32 MiB and more to the kernel. Smaller blocks stay in the process; otherwise each tensor would cost page
# faults, which doubles the time of small steps.
_ALLOCATOR = {
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def common_environment(log_level: str) -> dict[str, str]:
    """Environment variables that must be set before the process starts or TensorFlow is imported.

    Args:
        log_level: log level of the process.
    """
    logs = {FORMAT_VARIABLE: os.environ[FORMAT_VARIABLE]} if FORMAT_VARIABLE in os.environ else {}
    return _ALLOCATOR | {"PYTHONUNBUFFERED": "1", VARIABLE: chosen_backend()} | quiet_environment(log_level) | logs


@dataclass(frozen=True, kw_only=True)
class RoleProcess:
    """One process. Its listening address is given by the settings of the same names that apply to its role.

    Attributes:
        role: "worker" or "ps".
        master: address of the master, "host:port".
        index: its index, from 0; -1: the master chooses.
        access: credentials of the job; the token is passed in the environment, TLS files by flags.
        parent_pid: process with which this process ends.
        keras_backend: Keras backend of the job.
    """

    role: str
    master: str
    index: int = -1
    access: Access = OPEN
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    health_port: int | None = None
    parent_pid: int | None = None
    keras_backend: str = field(default_factory=chosen_backend)

    @property
    def place(self) -> Place:
        return self.role, self.index

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the `elasticcb` command."""
        listens = [each.field for each in settings_of(ClusterSettings) if self.role in each.roles]
        names = ["master", "index", *(name for name in listens if name in _LISTENS), "parent_pid"]
        given = [(name, getattr(self, name)) for name in names if getattr(self, name) != getattr(RoleProcess, name, "")]
        if self.access.tls is not None:
            tls = self.access.tls.files.flags
        else:
            tls = [] if is_folder(self.master) else ["--insecure"]
        return self.role, *(text for name, value in given for text in (f"--{name}", str(value))), *tls

    def environment(self, log_level: str) -> dict[str, str]:
        """Its environment variables, including the token of the job."""
        chosen = {VARIABLE: backend_of_role(self.role, self.keras_backend)}
        return common_environment(log_level) | chosen | {TOKEN_VARIABLE: self.access.token}
