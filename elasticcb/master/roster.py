"""The processes of a job: planned, requested, observed. Pure; it does not know how they are run.

The replacement of a lost member takes its slot, with a new id: ids are never reused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from elasticcb.errors import UsageError
from elasticcb.master.members import Member, PlaceState, Role
from elasticcb.process.wording import how_many


@dataclass(slots=True)
class Present:
    """A member that is up.

    Attributes:
        job: the job that it last registered for.
        idle: it has finished that job.
        released: it should leave, because fewer are needed.
        leaves: it has been told so, and will leave although it may be needed again.
    """

    member: Member
    seen: float
    job: int
    idle: bool = False
    released: bool = False
    leaves: bool = False


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


_EXPECTED = (PlaceState.PLANNED, PlaceState.REQUESTED)


@dataclass(frozen=True, slots=True)
class Sighting:
    """Whether the process with an id may take part in the job, and why not."""

    accepted: bool
    reason: str


Method = TypeVar("Method", bound=Callable[..., Any])


def _changing(method: Method) -> Method:
    """Marks a method of `Roster` that changes what `to_dict` returns."""

    @functools.wraps(method)
    def change(roster: Roster, *args: Any, **kwargs: Any) -> Any:
        roster.saved = None
        return method(roster, *args, **kwargs)

    return cast(Method, change)


class Roster:
    """Which processes should run, were requested, and are up.

    Attributes:
        lost_workers: ids of workers declared lost, in order; they may still be running without knowing it.
        losses: counts losses, and decides their consequences.
        next_id: next member id. Servers identify pushes by it: ids of an earlier master must not be reused.
    """

    def __init__(self, num_workers: int, num_ps: int, max_worker_restarts: int, max_ps_restarts: int = 0) -> None:
        self._sizes = {Role.WORKER: num_workers, Role.PS: num_ps}
        self.losses = Losses({Role.WORKER: max_worker_restarts, Role.PS: max_ps_restarts})
        self._places = {
            (role, index): PlaceState.PLANNED for role, size in self._sizes.items() for index in range(size)
        }
        self._present = Presence()
        self.next_id = 1
        self.lost_workers: list[int] = []
        self.saved: dict[str, Any] | None = None  # most of `to_dict`, until something changes

    # ------------------------------------------------------------ observed

    @_changing
    def register(self, role: Role, index: int, address: str, pid: int, host: str, now: float, job: int = 1) -> Member:
        """A process is up, and ready for a job.

        Args:
            index: slot that it takes; -1: the first free one.
            job: number of the job, from 1.

        A process that registers again for the same slot (for the next job, or because its first answer got lost) is the
        same member.
        Raises `UsageError` when there is no such slot, or none is free.
        """
        if index == -1:
            again = next((m for m in self.up(role) if (m.address, m.pid, m.host) == (address, pid, host)), None)
            index = self._free_place(role) if again is None else again.index
        elif not 0 <= index < self._sizes[role]:
            raise UsageError(
                f"A process asked to be {role.value} {index}, but this job has {self._sizes[role]}, numbered from 0. "
                "Give it one of these numbers, or none."
            )
        place = (role, index)
        if place in self._present.by_place:
            present = self._present.by_place[place]
            member = present.member
            if (member.address, member.pid, member.host) == (address, pid, host):
                present.seen, present.job, present.idle = now, job, False
                return member
            raise UsageError(
                f"Process {pid} on {host} asked to be {role.value} {index}, but {member} has this number. Give it "
                "another number, or stop the other process first."
            )
        member = Member(self.next_id, role, index, address, pid, host)
        self.next_id += 1
        self._present.add(Present(member, now, job))
        self._places[place] = PlaceState.UP
        self.losses.taken_again(role, index)
        return member

    def seen(self, id: int, now: float) -> Sighting:
        """A heartbeat of a process; refused if it is unknown, lost, or has left."""
        if id not in self._present.by_id:
            return Sighting(False, self._present.why_unknown(id))
        self._present.by_id[id].seen = max(now, self._present.by_id[id].seen)
        return Sighting(True, "up")

    @_changing
    def idle(self, id: int) -> None:
        """A process has finished its job and waits for the next."""
        if id in self._present.by_id:
            self._present.by_id[id].idle = True

    @_changing
    def left(self, id: int) -> Sighting:
        """A process deregisters; it is replaced only if it was to leave, and its slot is needed again."""
        leaves = id in self._present.by_id and self._present.by_id[id].leaves
        member = self._present.remove(id, "it deregistered")
        if member is None:
            return Sighting(False, self._present.why_unknown(id))
        self._places[member.role, member.index] = PlaceState.PLANNED if leaves else PlaceState.LEFT
        if self._has_no_place(member.role, member.index):
            self._close(member.role, member.index, "")
        return Sighting(True, f"{member} left")

    @_changing
    def lost(self, id: int, reason: str, taken_away: bool = False) -> LossDecision:
        """A process exited without deregistering, or sent no heartbeat for too long.

        Args:
            taken_away: its machine was needed elsewhere; this does not use up a restart.

        Raises `UsageError` for an id that was never assigned.
        """
        member = self._present.remove(id, reason)
        if member is not None:
            if member.role is Role.WORKER:
                self.lost_workers.append(id)
            return self._decide(member.role, member.index, f"{member} was lost: {reason}", taken_away)
        gone, why = self._present.find(id), self._present.why_unknown(id)
        if gone is None:
            raise UsageError(f"Process {id} was reported lost, but {why}.")
        return LossDecision(Consequence.IGNORE, gone.role, gone.index, why)

    @_changing
    def asked_to_end(self, id: int, reason: str) -> LossDecision:
        """A process leaves through no fault of its own: it is replaced, and no restart is used up."""
        member = self._present.remove(id, reason)
        if member is None:
            return LossDecision(Consequence.IGNORE, Role.WORKER, -1, self._present.why_unknown(id))
        if self._has_no_place(member.role, member.index):
            return self._close(member.role, member.index, f"{member} leaves: the job needs fewer")
        return self._decide(member.role, member.index, f"{member} leaves: {reason}", taken_away=True)

    @_changing
    def place_lost(self, role: Role, index: int, reason: str, taken_away: bool = False) -> LossDecision:
        """The process started for a slot is gone, registered or not; see `lost`."""
        place = (role, index)
        if place in self._present.by_place:
            return self.lost(self._present.by_place[place].member.id, reason, taken_away)
        if not self.is_requested(role, index):
            state = self._places[place].value if place in self._places else "not part of this job"
            return LossDecision(Consequence.IGNORE, role, index, f"{role.value} {index} is {state}")
        return self._decide(role, index, f"{role.value} {index} ended before it registered: {reason}", taken_away)

    def silent(self, now: float, silence_seconds: float) -> list[Member]:
        """Members without a heartbeat for `silence_seconds` or more."""
        return [present.member for present in self._present.by_id.values() if now - present.seen >= silence_seconds]

    def forgive(self, now: float) -> None:
        """Resets the heartbeat time of all members."""
        for present in self._present.by_id.values():
            present.seen = now

    # ------------------------------------------------------------ planned

    def to_start(self) -> list[tuple[Role, int]]:
        """Slots for which a process must be started."""
        return [place for place, state in self._places.items() if state is PlaceState.PLANNED]

    @_changing
    def requested(self, role: Role, index: int) -> None:
        """A process was requested for this slot."""
        if self._places.get((role, index)) is PlaceState.PLANNED:
            self._places[role, index] = PlaceState.REQUESTED

    @_changing
    def resize(self, role: Role, size: int) -> list[int]:
        """Changes the planned number of processes; returns the removed slots whose processes were requested but must
        not join.

        Surplus members that are up are `released`: they leave once they have reported
        what is done.
        """
        before, self._sizes[role] = self._sizes[role], size
        for present in self._present.of(role):
            present.released = present.member.index >= size
        for index in range(before, size):
            self._places.setdefault((role, index), PlaceState.PLANNED)
        unwanted = []
        for index in range(size, before):
            state = self._places.get((role, index))
            if state is PlaceState.REQUESTED:
                unwanted.append(index)
            if state is not PlaceState.UP:
                self._places.pop((role, index), None)
                self.losses.forget(role, index)
        return unwanted

    def released(self, id: int) -> bool:
        """Whether a process should leave; the answer goes to it."""
        present = self._present.by_id.get(id)
        if present is None or not present.released:
            return False
        present.leaves = True
        return True

    def leaving(self, role: Role) -> bool:
        """Whether a process that should leave is still up."""
        return any(present.released for present in self._present.of(role))

    # ------------------------------------------------------------ queries

    def size(self, role: Role) -> int:
        """Planned number."""
        return self._sizes[role]

    def member(self, id: int) -> Member | None:
        """The member with this id if it is up."""
        return self._present.by_id[id].member if id in self._present.by_id else None

    def is_up(self, id: int, role: Role) -> bool:
        """Whether the member with this id is up, and has that role."""
        return id in self._present.by_id and self._present.by_id[id].member.role is role

    def at(self, role: Role, index: int) -> Member | None:
        """The member in a slot, if it is up."""
        present = self._present.by_place.get((role, index))
        return None if present is None else present.member

    def up(self, role: Role) -> list[Member]:
        """Members of a role that are up, by index."""
        return [present.member for present in self._present.of(role)]

    def find(self, id: int) -> Member | None:
        """The member with this id, up or gone."""
        return self._present.find(id)

    def complete(self, role: Role, job: int = 1) -> bool:
        """Whether every slot of the role is taken by a process that is ready for the job."""
        size = self._sizes[role]
        return len([each for each in self._present.of(role) if each.job == job and each.member.index < size]) == size

    def job_of(self, id: int) -> int:
        """The job that a member last registered for; 0 when it is not up."""
        return self._present.by_id[id].job if id in self._present.by_id else 0

    def busy(self, role: Role) -> list[Member]:
        """Members of a role that are up and have not finished their job."""
        return [present.member for present in self._present.of(role) if not present.idle]

    def any_left(self, role: Role, job: int) -> bool:
        """Whether a member of a role is expected, or is up and has not finished `job`."""
        if any(other is role and state in _EXPECTED for (other, _), state in self._places.items()):
            return True
        return any(not present.idle or present.job != job for present in self._present.of(role))

    def state(self, role: Role, index: int) -> PlaceState:
        return self._places[role, index]

    def is_requested(self, role: Role, index: int) -> bool:
        """Whether a process was requested for this slot but has not registered; False if the slot is gone."""
        return self._places.get((role, index)) is PlaceState.REQUESTED

    def places(self) -> dict[tuple[Role, int], PlaceState]:
        """All slots and their states: workers first, by index."""
        return dict(sorted(self._places.items(), key=lambda item: (item[0][0] is Role.PS, item[0][1])))

    # ------------------------------------------------------------ saving

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for another master of the same processes. Of gone members only counts are saved."""
        self.saved = self.saved or {
            "sizes": {role.value: size for role, size in self._sizes.items()},
            "places": [[role.value, index, state.value] for (role, index), state in self._places.items()],
            "up": [
                [m.id, m.role.value, m.index, m.address, m.pid, m.host, present.job, present.idle]
                for present in self._present.by_id.values()
                for m in (present.member,)
            ],
            "released": sorted(id for id, present in self._present.by_id.items() if present.released),
            "lost_workers": list(self.lost_workers),
        }
        return {**self.saved, **self.losses.to_dict(), "next_id": self.next_id}

    @_changing
    def restore(self, saved: dict[str, Any], now: float) -> None:
        """Restores what `to_dict` saved. Requested processes must be requested again."""
        self._sizes = {Role(role): size for role, size in saved["sizes"].items()}
        self._places = {(Role(role), index): PlaceState(state) for role, index, state in saved["places"]}
        for place, state in self._places.items():
            if state is PlaceState.REQUESTED:
                self._places[place] = PlaceState.PLANNED
        for id, role, index, address, pid, host, job, idle in saved["up"]:
            member = Member(id, Role(role), index, address, pid, host)
            self._present.add(Present(member, now, job, idle, id in saved["released"]))
        self.losses.restore(saved)
        self.lost_workers = list(saved["lost_workers"])
        self.next_id = saved["next_id"]

    # ------------------------------------------------------------

    def _has_no_place(self, role: Role, index: int) -> bool:
        return index >= self._sizes[role]

    def _close(self, role: Role, index: int, reason: str) -> LossDecision:
        self._places.pop((role, index), None)
        return LossDecision(Consequence.IGNORE, role, index, reason)

    def _decide(self, role: Role, index: int, story: str, taken_away: bool = False) -> LossDecision:
        if self._has_no_place(role, index):
            return self._close(role, index, f"{story}; the job needs fewer")
        self._places[role, index] = PlaceState.GIVEN_UP
        others = sum(
            other is role and (state in _EXPECTED or state is PlaceState.UP)
            for (other, _), state in self._places.items()
        )
        decision = self.losses.decide(role, index, story, taken_away, others)
        if decision.kind is Consequence.RESTART:
            self._places[role, index] = PlaceState.PLANNED
        return decision

    def _free_place(self, role: Role) -> int:
        free = [place for place in range(self._sizes[role]) if (role, place) not in self._present.by_place]
        expected = [place for place in free if self._places[role, place] in _EXPECTED]
        for place in expected + free:
            return place
        raise UsageError(
            f"Another {role.value} asked to join, but this job already has all its {self._sizes[role]}. Start the job "
            "with more, or wait until one is lost."
        )


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
        name = "max_ps_restarts" if role is Role.PS else "max_worker_restarts"
        story += f"; all restarts ({name}={most}) are used up"
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
