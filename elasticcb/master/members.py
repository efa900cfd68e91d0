"""The processes of a job: what they do, where they stand, and who they are.

A place is (role, index); a member is one process that took a place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """What a process of the job does, besides the master."""

    WORKER = "worker"
    PS = "parameter server"

    @property
    def label(self) -> str:
        """As machines read it, and cluster backends: "worker", "ps"."""
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> Role:
        return cls[label.upper()]


class PlaceState(str, Enum):
    """Where a place stands."""

    PLANNED = "planned"  # somebody has to start a process for it
    REQUESTED = "requested"  # that was asked for; it has not registered yet
    UP = "up"
    LEFT = "left"  # its process said goodbye; nobody takes its place
    GIVEN_UP = "given up"  # its process was lost, and the restarts are used up

    @property
    def label(self) -> str:
        """As machines read it: "given_up"."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Member:
    """A process that registered."""

    id: int  # unique in the job, from 1
    role: Role
    index: int  # its place: 0 .. number of its role - 1
    address: str  # where it serves, "host:port"; "" for a worker
    pid: int
    host: str

    def __str__(self) -> str:
        return f"{self.role.value} {self.index} (id {self.id}, pid {self.pid} on {self.host})"
