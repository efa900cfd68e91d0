"""What the master tells of its servers, and counts of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elasticcb.sharding.bucket_map import BucketMap
    from elasticcb.sharding.partition import VariableSpec


class ServerPlace(NamedTuple):
    """Where the server in a place is, and which process that is."""

    address: str
    id: int


@dataclass(frozen=True)
class ServedCluster:
    """What a worker must know of the servers."""

    servers: Sequence[ServerPlace]
    variables: Sequence[VariableSpec]
    split: bool
    batch_events: bool = False  # whether it is to report each batch
    predictions: bool = False  # whether it is to report what it predicts
    buckets: BucketMap | None = None  # which server holds which rows of embedding tables; None: the even map

    @property
    def map_version(self) -> int:
        return 0 if self.buckets is None else self.buckets.version


@dataclass
class Recoveries:
    """What lost servers cost a job.

    Attributes:
        seconds: from each loss to the moment when the server that took the place held the model.
        updates_lost: of the model, as far as the master knew the version.
    """

    seconds: list[float] = field(default_factory=list)
    updates_lost: int = 0


@dataclass
class Totals:
    """What is counted over the whole job, beyond the task queue's own accounting."""

    gradients_rejected: int = 0
    batches_skipped: int = 0
    callback_errors: int = 0
    checkpoints_failed: int = 0  # that could not be written; training went on
    stragglers: list[int] = field(default_factory=list)  # places of workers that ever were


@dataclass
class Wish:
    """That there be another number of parameter servers.

    Attributes:
        servers, before: how many there are to be, and were.
        attempts: that failed.
        waits_for: what has to come before it, in words; "": nothing.
        moved: what was done, in words; "" before.
        error: why it was not.
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
