"""Which processes of a job are there, and which were. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elasticcb.master.members import Member, Role


@dataclass(slots=True)
class Present:
    """A member that is up.

    Attributes:
        seen: when it gave the last sign of life.
        job: that it registered for last.
        idle: it is done with that job.
        released: it is to leave, since fewer are needed.
    """

    member: Member
    seen: float
    job: int
    idle: bool = False
    released: bool = False


class Presence:
    """The members that registered.

    Attributes:
        by_id: the members that are up, by their id.
        by_place: the same, by role and index.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Present] = {}
        self.by_place: dict[tuple[Role, int], Present] = {}
        self._gone: dict[int, tuple[Member, str]] = {}  # by id, and why

    def add(self, present: Present) -> None:
        member = present.member
        self.by_id[member.id] = self.by_place[member.role, member.index] = present

    def remove(self, id: int, reason: str) -> Member | None:
        """The member that is not up any more; None: it was not."""
        present = self.by_id.pop(id, None)
        if present is None:
            return None
        member = present.member
        del self.by_place[member.role, member.index]
        self._gone[id] = (member, reason)
        return member

    def of(self, role: Role) -> list[Present]:
        """Those of a role that are up, by place."""
        found = (present for present in self.by_id.values() if present.member.role is role)
        return sorted(found, key=lambda present: present.member.index)

    def find(self, id: int) -> Member | None:
        """The member with this id, whether it is up or gone."""
        return self.by_id[id].member if id in self.by_id else self._gone.get(id, (None,))[0]

    def why_unknown(self, id: int) -> str:
        """Why no member with this id is up."""
        if id in self._gone:
            member, reason = self._gone[id]
            return f"{member} is no longer part of the job: {reason}"
        return f"no process with the id {id} ever registered"
