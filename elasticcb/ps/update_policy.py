"""Decides what becomes of a push: applied now, kept for a larger update, refused, or known already.

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
    """A push of a job; a retry has the same name."""

    worker: int
    sequence: int


class Action(Enum):
    APPLY = "apply"  # `pushes` become one update
    WAIT = "wait"  # accepted; more are needed for an update
    STALE = "stale"  # refused: computed on weights that are too old


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
    pushes: tuple[PushName, ...] = ()  # of the update, in the order of their arrival


class UpdatePolicy(ABC):
    """What becomes of the pushes of a job.

    Attributes:
        name: of the mode, for messages.
        first_decides: whether the first server decides for all, which then keep pushes until it says so.
        workers_wait: whether a worker goes on only when what it has pushed is a part of the model.
    """

    name: ClassVar[str]
    first_decides: ClassVar[bool]
    workers_wait: ClassVar[bool] = False

    @property
    def waiting(self) -> tuple[PushName, ...]:
        """Pushes of an update that is not there yet."""
        return ()

    def too_old(self, version: int, present: int) -> str:
        """Why gradients of `version` can't be used on weights of version `present`; "" when they can."""
        return ""

    @abstractmethod
    def decide(self, push: PushName, version: int, present: int) -> Decision:
        """What becomes of a push of gradients of `version`, the model being at `present`."""

    def keep(self, pushes: Collection[PushName]) -> None:  # noqa: B027 - where nothing waits
        """Forgets what waits, but for these."""

    def due(self, lost_workers: Collection[int]) -> Decision | None:
        """An update of what waits, if it waits for nobody any more."""
        return None

    def flush(self) -> Decision:
        """Makes an update of what waits, however little it is."""
        return _update(())


class Asynchronous(UpdatePolicy):
    """Every push is an update."""

    name = "asynchronous"
    first_decides = False

    def decide(self, push: PushName, version: int, present: int) -> Decision:
        return _update((push,))


class Synchronous(UpdatePolicy):
    """An update is the mean of several pushes.

    Args:
        grads_to_wait: pushes of an update.
        version_tolerance: by how many versions the weights that a gradient was computed on may be older than the
            present ones.
    """

    name = "synchronous"
    first_decides = True

    def __init__(self, grads_to_wait: int = 1, version_tolerance: int = 0) -> None:
        self._grads_to_wait, self._tolerance = grads_to_wait, version_tolerance
        self._waiting: list[PushName] = []

    @property
    def waiting(self) -> tuple[PushName, ...]:
        return tuple(self._waiting)

    def too_old(self, version: int, present: int) -> str:
        if present - self._tolerance <= version <= present:
            return ""
        if version > present:
            return (
                f"computed on version {version}, but the model is at version {present}: it was restored "
                "from a checkpoint; pull and compute again"
            )
        return (
            f"computed on version {version}, the model is at version {present}, and at most "
            f"{self._tolerance} versions of difference are allowed; pull and compute again"
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

    def keep(self, pushes: Collection[PushName]) -> None:
        self._waiting = [name for name in self._waiting if name in pushes]

    def flush(self) -> Decision:
        pushes, self._waiting = tuple(self._waiting), []
        return _update(pushes)


_ROUNDS_KEPT = 9


class Rounds(UpdatePolicy):
    """Movements of local training are merged together: those of all workers that took part in the round before.

    One that does not come is waited for as long as the first one of a round usually takes: the median of the last
    rounds, which a pause between two epochs does not change; for `LEAST_SECONDS` at least. It takes part again when it
    comes.

    Args:
        clock: in seconds.
    """

    name = "local"
    first_decides = False
    workers_wait = True
    LEAST_SECONDS = 0.02

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: list[PushName] = []
        self._expected: frozenset[int] = frozenset()
        self._ended = self._first = clock()  # the last round; when the first movement of this one came
        self._usual: deque[float] = deque(maxlen=_ROUNDS_KEPT)  # seconds between the two

    @property
    def waiting(self) -> tuple[PushName, ...]:
        return tuple(self._waiting)

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

    def keep(self, pushes: Collection[PushName]) -> None:
        self._waiting = [name for name in self._waiting if name in pushes]

    def flush(self) -> Decision:
        pushes, self._expected, self._ended = self.waiting, self._come or self._expected, self._clock()
        self._waiting = []
        return _update(pushes)


def policy_of(training: TrainingSettings, replicas: bool, clock: Callable[[], float]) -> UpdatePolicy:
    """The policy that a job's settings ask for.

    Args:
        clock: as of `Rounds`.
        replicas: changes are made again from a neighbour's notes, which do not tell who waited for whom.
    """
    if training.is_synchronous:
        return Synchronous(training.grads_to_wait, training.sync_version_tolerance)
    if training.is_local and not replicas:
        return Rounds(clock)
    return Asynchronous()


def _update(pushes: tuple[PushName, ...]) -> Decision:
    return Decision(Action.APPLY, f"the mean of {len(pushes)} gradients", pushes)


class Answered(Generic[Answer]):
    """What was answered to the latest pushes of each worker, so that a retry gets it again.

    A worker retries only what it has just sent; `keep` answers for each are plenty.
    """

    def __init__(self, keep: int = 16) -> None:
        self._keep = keep
        self._answers: dict[int, OrderedDict[int, Answer]] = {}
        self._dropped: dict[int, int] = {}  # highest sequence number that was forgotten

    def find(self, push: PushName) -> Answer | None:
        return self._answers.get(push.worker, OrderedDict()).get(push.sequence)

    def forgotten(self, push: PushName) -> bool:
        """Whether the push was answered so long ago that the answer is gone."""
        return push.sequence <= self._dropped.get(push.worker, 0)

    def knows(self, push: PushName) -> bool:
        """Whether the push was answered at any time."""
        return self.find(push) is not None or self.forgotten(push)

    def last(self) -> dict[int, int]:
        """By worker, the sequence number of the last push that was answered."""
        return {worker: next(reversed(answers)) for worker, answers in self._answers.items()} | {
            worker: last for worker, last in self._dropped.items() if worker not in self._answers
        }

    def forget_up_to(self, last: Mapping[int, int]) -> None:
        """What was answered before is known, but not how: by worker, up to a sequence number."""
        self._dropped.update(last)

    def remember(self, push: PushName, answer: Answer) -> None:
        answers = self._answers.setdefault(push.worker, OrderedDict())
        answers[push.sequence] = answer
        while len(answers) > self._keep:
            self._dropped[push.worker] = answers.popitem(last=False)[0]
