"""Which processes of a job are up, and which were. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elasticcb.master.members import Member, Role


@dataclass(slots=True)
class Present:
    """A member that is up.

    Attributes:
        job: the job that it last registered for.
        idle: it has finished that job.
        released: it should leave, because fewer are needed.
    """

    member: Member
    seen: float
    job: int
    idle: bool = False
    released: bool = False


class Presence:
    """The registered members.

    Attributes:
        by_id: members that are up, by id.
        by_place: the same, by role and index.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Present] = {}
        self.by_place: dict[tuple[Role, int], Present] = {}
        self._gone: dict[int, tuple[Member, str]] = {}  # by id, with the reason

    def add(self, present: Present) -> None:
        member = present.member
        self.by_id[member.id] = self.by_place[member.role, member.index] = present

    def remove(self, id: int, reason: str) -> Member | None:
        """Removes and returns a member that is no longer up; None: it was not up."""
        present = self.by_id.pop(id, None)
        if present is None:
            return None
        member = present.member
        del self.by_place[member.role, member.index]
        self._gone[id] = (member, reason)
        return member

    def of(self, role: Role) -> list[Present]:
        """Members of a role that are up, by index."""
        found = (present for present in self.by_id.values() if present.member.role is role)
        return sorted(found, key=lambda present: present.member.index)

    def find(self, id: int) -> Member | None:
        """The member with this id, up or gone."""
        return self.by_id[id].member if id in self.by_id else self._gone.get(id, (None,))[0]

    def why_unknown(self, id: int) -> str:
        """Why no member with this id is up."""
        if id in self._gone:
            member, reason = self._gone[id]
            return f"{member} is no longer part of the job: {reason}"
        return f"no process with id {id} ever registered"
