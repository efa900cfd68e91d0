"""Decides what to do with a push: apply it now, keep it for a larger update, or refuse it.

Pure: pushes in, decisions out, each with its reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import ClassVar, Generic, NamedTuple, TypeVar

from elasticcb.settings import TrainingSettings

Answer = TypeVar("Answer")


class PushName(NamedTuple):
    """Identifies a push of a job; a retry has the same name."""

    worker: int
    sequence: int


class Action(Enum):
    APPLY = "apply"  # `pushes` as one update
    WAIT = "wait"  # accepted; more are needed for an update
    STALE = "stale"  # refused: computed on weights that are too old


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
    pushes: tuple[PushName, ...] = ()  # of the update, in order of arrival


class UpdatePolicy(ABC):
    """How the pushes of a job are handled.

    Attributes:
        first_decides: whether the first server decides for all, and the others keep pushes until then.
        workers_wait: whether a worker continues only when its push is part of the model.
    """

    name: ClassVar[str]
    first_decides: ClassVar[bool]
    workers_wait: ClassVar[bool] = False

    def __init__(self) -> None:
        self._waiting: list[PushName] = []

    @property
    def waiting(self) -> tuple[PushName, ...]:
        """Pushes that wait for an update."""
        return tuple(self._waiting)

    def too_old(self, version: int, present: int) -> str:
        """Why gradients of `version` can't be applied to weights of version `present`; "" when they can."""
        return ""

    @abstractmethod
    def decide(self, push: PushName, version: int, present: int) -> Decision:
        """What to do with a push of gradients of `version` when the model is at `present`."""

    def keep(self, pushes: Collection[PushName]) -> None:
        """Drops all waiting pushes except these."""
        self._waiting = [name for name in self._waiting if name in pushes]

    def due(self, lost_workers: Collection[int]) -> Decision | None:
        """An update of the waiting pushes, if no other push is awaited."""
        return None

    def flush(self) -> Decision:
        """An update of the waiting pushes, however few."""
        pushes, self._waiting = self.waiting, []
        return _update(pushes)


class Asynchronous(UpdatePolicy):
    """Every push is an update."""

    name = "asynchronous"
    first_decides = False

    def decide(self, push: PushName, version: int, present: int) -> Decision:
        return _update((push,))


class Synchronous(UpdatePolicy):
    """An update is the mean of several pushes."""

    name = "synchronous"
    first_decides = True

    def __init__(self, grads_to_wait: int = 1, version_tolerance: int = 0) -> None:
        super().__init__()
        self._grads_to_wait, self._tolerance = grads_to_wait, version_tolerance

    def too_old(self, version: int, present: int) -> str:
        if present - self._tolerance <= version <= present:
            return ""
        if version > present:
            return (
                f"computed on version {version}, but the model is at version {present}: it was restored from a "
                "checkpoint; pull and compute again"
            )
        return (
            f"computed on version {version}, but the model is at version {present} and the tolerance is "
            f"{self._tolerance} versions; pull and compute again"
        )

    def decide(self, push: PushName, version: int, present: int) -> Decision:
        reason = self.too_old(version, present)
        if reason:
            return Decision(Action.STALE, reason)
        self._waiting.append(push)
        count = len(self._waiting)
        if count < self._grads_to_wait:
            return Decision(Action.WAIT, f"{count} of {self._grads_to_wait} gradients of the next update")
        return self.flush()


_ROUNDS_KEPT = 9


class Rounds(UpdatePolicy):
    """Merges movements of local training together: those of all workers that took part in the previous round.

    After the first movement of a round, missing ones are awaited as long as the first movement usually takes after the
    previous round: the median of the last rounds, which a pause between two epochs does not change; at least
    `LEAST_SECONDS`. A worker whose movement came too late takes part again when it comes.
    """

    name = "local"
    first_decides = False
    workers_wait = True
    LEAST_SECONDS = 0.02

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._expected: frozenset[int] = frozenset()
        self._ended = self._first = clock()  # end of the last round; when the first movement of this one came
        self._usual: deque[float] = deque(maxlen=_ROUNDS_KEPT)  # seconds between these two

    def decide(self, push: PushName, version: int, present: int) -> Decision:
        if not self._waiting:
            self._first = self._clock()
            self._usual.append(self._first - self._ended)
        self._waiting.append(push)
        missing = len(self._expected.difference(self._come))
        return self.due(()) or Decision(Action.WAIT, f"{missing} more workers are expected")

    @property
    def _come(self) -> frozenset[int]:
        return frozenset(name.worker for name in self._waiting)

    def due(self, lost_workers: Collection[int]) -> Decision | None:
        if not self._waiting:
            return None
        patience = max(median(self._usual), self.LEAST_SECONDS)
        is_over = self._clock() - self._first >= patience
        return self.flush() if is_over or self._expected.difference(lost_workers) <= self._come else None

    def flush(self) -> Decision:
        self._expected, self._ended = self._come or self._expected, self._clock()
        return super().flush()


def policy_of(training: TrainingSettings, replicas: bool, clock: Callable[[], float]) -> UpdatePolicy:
    """The policy for a job's settings.

    Args:
        replicas: whether changes are replayed from a neighbour's log, which does not record who waited for whom.
    """
    if training.is_synchronous:
        return Synchronous(training.grads_to_wait, training.sync_version_tolerance)
    if training.is_local and not replicas:
        return Rounds(clock)
    return Asynchronous()


def _update(pushes: tuple[PushName, ...]) -> Decision:
    return Decision(Action.APPLY, f"the mean of {len(pushes)} gradients", pushes)


class Answered(Generic[Answer]):
    """Answers to the latest pushes of each worker, for retries.

    A worker only retries its latest push, so `keep` answers per worker are plenty.
    """

    def __init__(self, keep: int = 16) -> None:
        self._keep = keep
        self._answers: dict[int, OrderedDict[int, Answer]] = {}
        self._dropped: dict[int, int] = {}  # highest sequence number that was dropped

    def find(self, push: PushName) -> Answer | None:
        return self._answers.get(push.worker, OrderedDict()).get(push.sequence)

    def forgotten(self, push: PushName) -> bool:
        """Whether the push was answered so long ago that the answer was dropped."""
        return push.sequence <= self._dropped.get(push.worker, 0)

    def knows(self, push: PushName) -> bool:
        """Whether the push was ever answered."""
        return self.find(push) is not None or self.forgotten(push)

    def last(self) -> dict[int, int]:
        """By worker, the sequence number of its last answered push."""
        return {worker: next(reversed(answers)) for worker, answers in self._answers.items()} | {
            worker: last for worker, last in self._dropped.items() if worker not in self._answers
        }

    def forget_up_to(self, last: Mapping[int, int]) -> None:
        """Marks pushes up to a sequence number as answered, by worker, without their answers."""
        self._dropped.update(last)

    def remember(self, push: PushName, answer: Answer) -> None:
        answers = self._answers.setdefault(push.worker, OrderedDict())
        answers[push.sequence] = answer
        while len(answers) > self._keep:
            self._dropped[push.worker] = answers.popitem(last=False)[0]
