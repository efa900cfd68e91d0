"""The processes of a job: their roles, states and identities.

A slot is (role, index); a member is one process that occupies a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """The role of a process, besides the master."""

    WORKER = "worker"
    PS = "parameter server"

    @property
    def label(self) -> str:
        """Machine-readable name, also for cluster backends: "worker", "ps"."""
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> Role:
        return cls[label.upper()]


class PlaceState(str, Enum):
    """The state of a slot."""

    PLANNED = "planned"  # a process must be started for it
    REQUESTED = "requested"  # the start was requested; the process has not registered yet
    UP = "up"
    LEFT = "left"  # its process deregistered and is not replaced
    GIVEN_UP = "given up"  # its process was lost, and the restarts are used up

    @property
    def label(self) -> str:
        """Machine-readable name, such as "given_up"."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Member:
    """A registered process."""

    id: int  # unique in the job, from 1
    role: Role
    index: int  # its slot: 0 .. number of processes of its role - 1
    address: str  # where it listens, "host:port"; "" for a worker
    pid: int
    host: str

    def __str__(self) -> str:
        return f"{self.role.value} {self.index} (id {self.id}, pid {self.pid} on {self.host})"
