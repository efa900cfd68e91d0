"""What happens when a process is lost: a replacement, or the end of the job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elasticcb.master.members import Role
from elasticcb.process.wording import how_many


class Consequence(str, Enum):
    """Consequence of a loss."""

    RESTART = "restart"  # start a replacement
    FAIL = "fail"  # the job can't continue
    IGNORE = "ignore"  # do nothing


@dataclass(frozen=True, slots=True)
class LossDecision:
    """What to do about a loss, and why. `index` is the process's slot."""

    kind: Consequence
    role: Role
    index: int
    reason: str


class Losses:
    """Counts lost processes, and decides the consequence of each loss.

    Attributes:
        recovers_ps: whether the part of the model on a lost server can be restored.
    """

    def __init__(self, max_restarts: Mapping[Role, int]) -> None:
        self.recovers_ps = True
        self.lost = dict.fromkeys(Role, 0)
        self.replaced = dict.fromkeys(Role, 0)
        self._max_restarts = max_restarts
        self._restarts = dict.fromkeys(Role, 0)
        self._vacated: set[tuple[Role, int]] = set()  # slots not yet taken again

    def decide(self, role: Role, index: int, story: str, taken_away: bool, others: int) -> LossDecision:
        """The consequence of the loss described by `story`.

        Args:
            taken_away: the machine was needed elsewhere; this does not use up a restart.
            others: number of processes of the role that are up, or will be.
        """
        self.lost[role] += 1
        if role is Role.PS and not self.recovers_ps:
            return LossDecision(Consequence.FAIL, role, index, f"{story}; its part of the model is lost")
        most = self._max_restarts[role]
        if taken_away or self._restarts[role] < most:
            if not taken_away:
                self._restarts[role] += 1
                story += f"; restart {self._restarts[role]} of {most}"
            self._vacated.add((role, index))
            return LossDecision(Consequence.RESTART, role, index, story)
        flag = "--max_ps_restarts" if role is Role.PS else "--max_worker_restarts"
        story += f"; all restarts ({flag}={most}) are used up"
        if role is Role.PS:
            return LossDecision(Consequence.FAIL, role, index, story)
        if others:
            return LossDecision(Consequence.IGNORE, role, index, f"{story}; {how_many(others, 'other worker')} left")
        return LossDecision(Consequence.FAIL, role, index, f"{story} and no workers are left")

    def taken_again(self, role: Role, index: int) -> None:
        """A process took a slot, possibly that of a lost one."""
        if (role, index) in self._vacated:
            self._vacated.remove((role, index))
            self.replaced[role] += 1

    def forget(self, role: Role, index: int) -> None:
        """The slot no longer exists."""
        self._vacated.discard((role, index))

    def count_earlier(self, role: Role, lost: int, replaced: int) -> None:
        """Adds the losses and replacements under an earlier master."""
        self.lost[role] += lost
        self.replaced[role] += replaced

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "counts": [[self._restarts[role], self.lost[role], self.replaced[role]] for role in Role],
            "vacated": sorted([role.value, index] for role, index in self._vacated),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        for role, counts in zip(Role, saved["counts"], strict=True):
            self._restarts[role], self.lost[role], self.replaced[role] = counts
        self._vacated = {(Role(role), index) for role, index in saved["vacated"]}
