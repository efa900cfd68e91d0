"""What follows from the loss of a process: another in its place, or the end of the job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elasticcb.master.members import Role


class Consequence(str, Enum):
    """What a loss leads to."""

    RESTART = "restart"  # start another process in its place
    FAIL = "fail"  # the job can't go on
    IGNORE = "ignore"  # nothing is to be done


@dataclass(frozen=True, slots=True)
class LossDecision:
    """What to do about a loss, and why. `index` is the place of the process."""

    kind: Consequence
    role: Role
    index: int
    reason: str


class Losses:
    """Counts lost processes, and decides what follows from each loss.

    Args:
        max_restarts: by role, processes that may be started in the place of lost ones, over the whole job.

    Attributes:
        recovers_ps: whether the part of the model that a lost server held can be had again.
        lost: processes, by role.
        replaced: places of lost processes that were taken again, by role.
    """

    def __init__(self, max_restarts: Mapping[Role, int]) -> None:
        self.recovers_ps = True
        self.lost = dict.fromkeys(Role, 0)
        self.replaced = dict.fromkeys(Role, 0)
        self._max_restarts = max_restarts
        self._restarts = dict.fromkeys(Role, 0)
        self._vacated: set[tuple[Role, int]] = set()  # places that were not taken again yet

    def decide(self, role: Role, index: int, story: str, taken_away: bool, others: int) -> LossDecision:
        """What follows from the loss that `story` tells.

        Args:
            taken_away: others wanted its machine; no restart is used up.
            others: processes of the role that are there, or will be.
        """
        self.lost[role] += 1
        if role is Role.PS and not self.recovers_ps:
            return LossDecision(Consequence.FAIL, role, index, f"{story}; its part of the model is gone")
        most = self._max_restarts[role]
        if taken_away or self._restarts[role] < most:
            if not taken_away:
                self._restarts[role] += 1
                story += f"; restart {self._restarts[role]} of {most}"
            self._vacated.add((role, index))
            return LossDecision(Consequence.RESTART, role, index, story)
        flag = "--max_ps_restarts" if role is Role.PS else "--max_worker_restarts"
        story += f"; the {most} restarts ({flag}) are used up"
        if role is Role.PS:
            return LossDecision(Consequence.FAIL, role, index, story)
        if others:
            return LossDecision(Consequence.IGNORE, role, index, f"{story}, {others} other workers go on")
        return LossDecision(Consequence.FAIL, role, index, f"{story} and no worker is left")

    def taken_again(self, role: Role, index: int) -> None:
        """A process is in a place, which may be that of a lost one."""
        if (role, index) in self._vacated:
            self._vacated.remove((role, index))
            self.replaced[role] += 1

    def forget(self, role: Role, index: int) -> None:
        """There is no such place any more."""
        self._vacated.discard((role, index))

    def count_earlier(self, role: Role, lost: int, replaced: int) -> None:
        """Adds those that were lost, and whose places were taken again, under an earlier master."""
        self.lost[role] += lost
        self.replaced[role] += replaced

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "counts": [[self._restarts[role], self.lost[role], self.replaced[role]] for role in Role],
            "vacated": sorted([role.value, index] for role, index in self._vacated),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        for role, counts in zip(Role, saved["counts"], strict=True):
            self._restarts[role], self.lost[role], self.replaced[role] = counts
        self._vacated = {(Role(role), index) for role, index in saved["vacated"]}
