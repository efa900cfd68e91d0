from __future__ import annotations

import json

import pytest

from elasticcb.errors import UsageError
from elasticcb.master.members import Member, PlaceState, Role
from elasticcb.master.roster import Consequence, Roster

WORKER, PS = Role.WORKER, Role.PS


def register(roster: Roster, role: Role = WORKER, index: int = -1, pid: int = 0, now: float = 0.0) -> Member:
    address = "" if role is WORKER else f"localhost:{pid}"
    return roster.register(role, index, address, pid, "host", now)


def test_all_places_are_to_start_and_are_asked_for_once():
    roster = Roster(num_workers=2, num_ps=1, max_worker_restarts=0)
    assert sorted(roster.to_start()) == [(PS, 0), (WORKER, 0), (WORKER, 1)]
    for place in roster.to_start():
        roster.requested(*place)
    assert roster.to_start() == []
    assert roster.state(WORKER, 1) is PlaceState.REQUESTED


def test_members_have_ids_of_their_own_and_places_by_index():
    roster = Roster(2, 1, 0)
    members = [register(roster, WORKER, 1, 11), register(roster, PS, 0, 12), register(roster, WORKER, -1, 13)]
    assert [(m.id, m.role, m.index) for m in members] == [(1, WORKER, 1), (2, PS, 0), (3, WORKER, 0)]
    assert [m.index for m in roster.up(WORKER)] == [0, 1]
    assert roster.complete(WORKER)
    assert roster.complete(PS)
    assert roster.member(2) == members[1]


def test_process_that_registers_twice_gets_the_same_answer():
    roster = Roster(1, 0, 0)
    assert register(roster, WORKER, 0, 11) == register(roster, WORKER, 0, 11)


def test_place_that_is_taken_is_refused():
    roster = Roster(1, 0, 0)
    register(roster, WORKER, 0, 11)
    with pytest.raises(UsageError, match=r"worker 0 \(id 1, pid 11 on host\)"):
        register(roster, WORKER, 0, 12)
    with pytest.raises(UsageError, match="already has all its 1"):
        register(roster, WORKER, -1, 12)


@pytest.mark.parametrize("index", [-2, 1])
def test_place_that_does_not_exist_is_refused(index):
    with pytest.raises(UsageError, match="this job has 1"):
        register(Roster(1, 0, 0), WORKER, index)


def test_lost_worker_is_replaced_by_one_with_another_id():
    roster = Roster(1, 0, max_worker_restarts=2)
    first = register(roster, pid=11)
    decision = roster.lost(first.id, "exit code 1")
    assert (decision.kind, decision.role, decision.index) == (Consequence.RESTART, WORKER, 0)
    assert "exit code 1" in decision.reason
    assert "restart 1 of 2" in decision.reason
    assert roster.to_start() == [(WORKER, 0)]
    assert not roster.complete(WORKER)
    second = register(roster, WORKER, 0, 11)
    assert second.id != first.id
    assert (roster.losses.lost[WORKER], roster.losses.replaced[WORKER]) == (1, 1)


def test_job_goes_on_with_the_other_workers_when_the_restarts_are_used_up():
    roster = Roster(2, 0, max_worker_restarts=0)
    first, second = register(roster, pid=1), register(roster, pid=2)
    decision = roster.lost(first.id, "killed")
    assert decision.kind is Consequence.IGNORE
    assert "; 1 other worker left" in decision.reason
    assert roster.state(WORKER, 0) is PlaceState.GIVEN_UP
    decision = roster.lost(second.id, "killed")
    assert decision.kind is Consequence.FAIL
    assert "no workers are left" in decision.reason


def test_worker_that_is_expected_counts_as_one_that_can_go_on():
    roster = Roster(2, 0, max_worker_restarts=1)
    first, second = register(roster, pid=1), register(roster, pid=2)
    assert roster.lost(first.id, "killed").kind is Consequence.RESTART
    assert roster.lost(second.id, "killed").kind is Consequence.IGNORE


def test_second_loss_of_the_same_process_is_ignored():
    roster = Roster(1, 0, max_worker_restarts=5)
    member = register(roster)
    roster.lost(member.id, "connection closed")
    decision = roster.lost(member.id, "exit code 1")
    assert decision.kind is Consequence.IGNORE
    assert "connection closed" in decision.reason
    assert roster.losses.lost[WORKER] == 1


def test_process_that_ends_before_it_registers_uses_up_a_restart():
    roster = Roster(1, 0, max_worker_restarts=1)
    for expected in (Consequence.RESTART, Consequence.FAIL):
        roster.requested(WORKER, 0)
        assert roster.place_lost(WORKER, 0, "exit code 1").kind is expected
    assert roster.place_lost(WORKER, 0, "exit code 1").kind is Consequence.IGNORE


def test_process_that_said_goodbye_is_not_replaced_and_its_end_is_no_loss():
    roster = Roster(1, 0, max_worker_restarts=5)
    member = register(roster)
    assert roster.left(member.id).accepted
    assert roster.state(WORKER, 0) is PlaceState.LEFT
    assert roster.place_lost(WORKER, 0, "exit code 0").kind is Consequence.IGNORE
    assert roster.lost(member.id, "gone").kind is Consequence.IGNORE
    assert roster.to_start() == []
    assert roster.losses.lost[WORKER] == 0


def test_place_that_is_expected_is_taken_before_one_that_was_left():
    roster = Roster(2, 0, 0)
    roster.left(register(roster, WORKER, 0, 1).id)
    assert register(roster, WORKER, -1, 2).index == 1
    assert register(roster, WORKER, -1, 3).index == 0


def test_process_that_was_asked_to_end_is_replaced_and_uses_up_no_restart():
    roster = Roster(1, 1, 0)
    worker, server = register(roster), register(roster, PS)
    decision = roster.asked_to_end(worker.id, "it was asked to end")
    assert decision.kind is Consequence.RESTART
    assert roster.to_start() == [(WORKER, 0)]
    assert roster.asked_to_end(worker.id, "it was asked to end").kind is Consequence.IGNORE
    assert roster.asked_to_end(server.id, "it was asked to end").kind is Consequence.RESTART
    register(roster)
    assert (roster.losses.lost[WORKER], roster.losses.replaced[WORKER]) == (1, 1)


def test_server_whose_part_of_the_model_can_not_be_had_again_fails_the_job_even_when_it_was_asked_to_end():
    roster = Roster(1, 1, 0, max_ps_restarts=1)
    roster.losses.recovers_ps = False
    assert roster.asked_to_end(register(roster, PS).id, "it was asked to end").kind is Consequence.FAIL


def test_places_are_added_and_taken_away():
    roster = Roster(2, 0, 0)
    first, second = register(roster, pid=1), register(roster, pid=2)
    assert roster.resize(Role.WORKER, 4) == []
    assert roster.to_start() == [(WORKER, 2), (WORKER, 3)]
    roster.requested(WORKER, 2)

    assert roster.resize(Role.WORKER, 1) == [2]  # its process is on the way
    assert roster.to_start() == []
    assert [roster.released(member.id) for member in (first, second)] == [False, True]
    assert roster.complete(WORKER)
    with pytest.raises(UsageError, match="this job has 1"):
        register(roster, WORKER, 2, pid=4)
    assert roster.asked_to_end(second.id, "it was asked to end").kind is Consequence.IGNORE
    assert roster.to_start() == []
    assert roster.losses.lost[WORKER] == 0

    roster.resize(Role.WORKER, 2)
    assert roster.to_start() == [(WORKER, 1)]
    third = register(roster, pid=3)
    roster.resize(Role.WORKER, 1)
    assert roster.lost(third.id, "killed").kind is Consequence.IGNORE
    assert roster.up(WORKER) == [first]


def test_worker_that_is_needed_again_before_it_has_left_may_stay():
    roster = Roster(2, 0, 0)
    second = [register(roster, pid=pid) for pid in (1, 2)][1]
    roster.resize(Role.WORKER, 1)
    roster.resize(Role.WORKER, 2)
    assert not roster.released(second.id)
    assert roster.asked_to_end(second.id, "it was asked to end").kind is Consequence.RESTART


def test_another_master_goes_on_with_a_saved_roster():
    roster = Roster(3, 1, max_worker_restarts=2, max_ps_restarts=1)
    for place in roster.to_start():
        roster.requested(*place)
    server = register(roster, PS, 0, 11)
    workers = [register(roster, WORKER, index, 20 + index) for index in range(2)]
    roster.lost(workers[1].id, "killed")
    again = Roster(3, 1, max_worker_restarts=2, max_ps_restarts=1)
    again.restore(json.loads(json.dumps(roster.to_dict())), now=5.0)
    assert again.to_dict()["up"] == roster.to_dict()["up"]
    assert again.at(PS, 0) == server
    assert again.seen(workers[0].id, 6.0).accepted
    assert not again.seen(workers[1].id, 6.0).accepted
    assert sorted(again.to_start()) == [(WORKER, 1), (WORKER, 2)]  # who asked for them is gone
    assert register(again, WORKER, 0, 20) == workers[0]
    replacement = register(again, WORKER, 1, 31)
    assert replacement.id == roster.next_id
    assert (again.losses.lost[WORKER], again.losses.replaced[WORKER]) == (1, 1)
    assert again.lost_workers == [workers[1].id]
    assert "restart 2 of 2" in again.lost(replacement.id, "killed").reason


def test_a_server_that_leaves_when_it_is_needed_again_is_replaced():
    roster = Roster(1, 2, 0)
    second = [register(roster, PS, pid=pid) for pid in (1, 2)][1]
    roster.resize(PS, 1)
    assert roster.released(second.id)  # the answer to a heartbeat
    roster.resize(PS, 2)
    roster.left(second.id)
    assert (PS, 1) in roster.to_start()
