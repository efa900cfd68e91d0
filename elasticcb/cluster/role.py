"""A worker or a parameter server, described once: its command line and its environment, from which every backend starts
it, and which the commands `elasticcb worker` and `elasticcb ps` read again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from elasticcb.compute.registry import VARIABLE, backend_of_role, chosen_backend
from elasticcb.process.logs import FORMAT_VARIABLE, quiet_environment
from elasticcb.security.credentials import OPEN, TOKEN_VARIABLE, Access
from elasticcb.security.socket_folder import is_folder
from elasticcb.settings import ClusterSettings
from elasticcb.settings.definition import settings_of

Place = tuple[str, int]  # role and index
_LISTENS = ("host", "port", "health_port")

# TensorFlow's own allocator never gives memory back, so that a large model takes what was in use at its worst moment,
# and holes besides. glibc's gives blocks of 32 MiB and more back to the kernel. Smaller ones stay in the process: each
# tensor would otherwise pay for page faults, which doubles the time of small steps.
_ALLOCATOR = {
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def common_environment(log_level: str) -> dict[str, str]:
    """What must be set when the program of a process is loaded, or TensorFlow imported.

    Args:
        log_level: of the process.
    """
    logs = {FORMAT_VARIABLE: os.environ[FORMAT_VARIABLE]} if FORMAT_VARIABLE in os.environ else {}
    return _ALLOCATOR | {"PYTHONUNBUFFERED": "1", VARIABLE: chosen_backend()} | quiet_environment(log_level) | logs


@dataclass(frozen=True, kw_only=True)
class RoleProcess:
    """One process. Where it listens are the settings of these names that concern its role.

    Attributes:
        role: "worker" or "ps".
        master: where the master listens, "host:port".
        index: the place to take, counted from 0; -1: the master chooses.
        access: to the job; the token goes by the environment, the files of TLS by flags.
        parent_pid: with whose end this process ends.
        keras_backend: of the job.
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
        """Of the `elasticcb` command."""
        listens = [each.field for each in settings_of(ClusterSettings) if self.role in each.roles]
        names = ["master", "index", *(name for name in listens if name in _LISTENS), "parent_pid"]
        given = [(name, getattr(self, name)) for name in names if getattr(self, name) != getattr(RoleProcess, name, "")]
        if self.access.tls is not None:
            tls = self.access.tls.files.flags
        else:
            tls = [] if is_folder(self.master) else ["--insecure"]
        return self.role, *(text for name, value in given for text in (f"--{name}", str(value))), *tls

    def environment(self, log_level: str) -> dict[str, str]:
        """What it must have in its environment, the token of the job included."""
        chosen = {VARIABLE: backend_of_role(self.role, self.keras_backend)}
        return common_environment(log_level) | chosen | {TOKEN_VARIABLE: self.access.token}
