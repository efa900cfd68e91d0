"""The processes of a job: their roles, states and identities; and what the master reports about them, and totals.

A slot is (role, index); a member is one process that occupies a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticcb.sharding.partition import ServerPlace, VariableSpec


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


@dataclass(frozen=True)
class ServedCluster:
    """What a worker needs to know about the servers."""

    servers: Sequence[ServerPlace]
    variables: Sequence[VariableSpec]
    split: bool
    batch_events: bool = False  # whether to report each batch
    predictions: bool = False  # whether to report predictions
    replayed_metrics: Sequence[str] = ()  # as `ModelMetrics.replayed`
    progressive: bool = False  # whether to evaluate each batch before it is trained
    map_version: int = 0  # of their `ShardMap`


@dataclass
class Totals:
    """Totals over the whole job, besides the task queue's accounting."""

    batches_skipped: int = 0
    bad_records: int = 0  # that could not be converted, and were skipped
    callback_errors: int = 0
    checkpoints_failed: int = 0  # that could not be written; training continued
    stragglers: list[int] = field(default_factory=list)  # indexes of workers that were ever stragglers
    longest_recovery: float = 0.0  # seconds from the loss of a server until its replacement held the model
    updates_lost: int = 0  # with lost servers, as far as the master knew the version
    recovery_files_failed: int = 0  # times that a server could not write them

    def recovered(self, seconds: float, updates_lost: int) -> None:
        """Another server has replaced a lost one and holds its part."""
        self.longest_recovery = max(self.longest_recovery, seconds)
        self.updates_lost += updates_lost

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**vars(self), "stragglers": [*self.stragglers]}

    def count_earlier(self, saved: dict[str, Any]) -> None:
        """Adds the totals of an earlier master."""
        earlier = dict(saved)
        self.recovered(earlier.pop("longest_recovery"), earlier.pop("updates_lost"))
        for name, value in earlier.items():
            setattr(self, name, value)


@dataclass
class Wish:
    """A request to change the number of parameter servers.

    Attributes:
        waits_for: what must finish first, as text; "": nothing.
        moved: the result as text; "" until done.
        error: why it failed; "" unless it did.
    """

    servers: int
    before: int
    attempts: int = 0
    waits_for: str = ""
    moved: str = ""
    error: str = ""

    @property
    def done(self) -> bool:
        return bool(self.moved or self.error)
