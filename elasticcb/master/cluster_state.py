"""What the master tells of its servers, and counts of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticcb.clients.ps_places import ServerPlace
    from elasticcb.sharding.bucket_map import BucketMap
    from elasticcb.sharding.partition import VariableSpec


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
class Totals:
    """What is counted over the whole job, beyond the task queue's own accounting."""

    gradients_rejected: int = 0
    batches_skipped: int = 0
    callback_errors: int = 0
    checkpoints_failed: int = 0  # that could not be written; training went on
    stragglers: list[int] = field(default_factory=list)  # places of workers that ever were
    longest_recovery: float = 0.0  # seconds from a server's loss to the moment when another held the model
    updates_lost: int = 0  # with servers, as far as the master knew the version

    def recovered(self, seconds: float, updates_lost: int) -> None:
        """Another server holds the model in the place of a lost one."""
        self.longest_recovery = max(self.longest_recovery, seconds)
        self.updates_lost += updates_lost

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        saved = asdict(self)
        longest, lost = saved.pop("longest_recovery"), saved.pop("updates_lost")
        return {**saved, "recoveries": {"seconds": [longest], "updates_lost": lost}}

    def count_earlier(self, saved: dict[str, Any]) -> None:
        """Goes on from what an earlier master counted."""
        earlier, recoveries = dict(saved), saved["recoveries"]
        del earlier["recoveries"]
        for name, value in earlier.items():
            setattr(self, name, value)
        self.recovered(max(recoveries["seconds"], default=0.0), recoveries["updates_lost"])


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
