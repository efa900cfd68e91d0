"""Who is missed, and when; no process, thread or clock."""

import pytest
from master_state import settings_of, state_of

from elasticcb.cluster.base import ClusterBackend
from elasticcb.master.master import Master, Watchdog
from elasticcb.master.members import Role
from elasticcb.settings import Command


class Backend(ClusterBackend):
    def __init__(self, watches):
        self.watches = watches
        self.killed = []

    def start(self, role, index, master_address):
        raise AssertionError("nothing is started here")

    def poll(self):
        return []

    def kill(self, role, index):
        self.killed.append((role, index))

    def stop(self, grace_seconds):
        raise AssertionError("nothing is stopped here")


class Watched:
    """A master with one worker and one server, which were seen last at 0 s; they may be silent for 30 s."""

    def __init__(self, watches=True, max_ps_restarts=10):
        self.backend = Backend(watches)
        self.lines = []
        settings = settings_of(Command.EVALUATE, max_ps_restarts=max_ps_restarts, lease_seconds=300.0)
        self.master = Master(settings.cluster, self.backend, self.lines.append)
        self.master.server.begin_job(settings)
        self.worker = state_of(self.master).roster.register(Role.WORKER, 0, "", 1, "here", 0.0).id
        self.server = state_of(self.master).roster.register(Role.PS, 0, "here:1", 2, "here", 0.0).id
        self.watchdog = Watchdog(self.master.server, 30.0, watches)
        self.look(0.0)

    def look(self, *seconds):
        for now in seconds:
            self.watchdog.look(now)


def test_silent_server_is_ended_and_another_takes_its_place():
    watched = Watched()
    watched.look(10.0, 20.0, 29.0)
    assert watched.backend.killed == []
    watched.look(30.0)
    assert watched.backend.killed == [("ps", 0)]
    assert state_of(watched.master).roster.to_start() == [(Role.PS, 0)]
    assert 0 in state_of(watched.master).lost_ps
    assert "no heartbeat for 30 s; restart 1 of 10" in watched.lines[0]


def test_worker_whose_end_the_backend_would_tell_has_the_time_of_a_lease():
    watched = Watched()
    state_of(watched.master).roster.left(watched.server)
    watched.look(*range(10, 300, 10))
    assert watched.backend.killed == []
    watched.look(300.0)
    assert watched.backend.killed == [("worker", 0)]
    assert state_of(watched.master).roster.to_start() == [(Role.WORKER, 0)]


def test_any_process_that_nobody_watches_is_missed_and_refused_when_it_comes_back():
    watched = Watched(watches=False)
    watched.look(15.0, 30.0)
    assert sorted(watched.backend.killed) == [("ps", 0), ("worker", 0)]
    for id in (watched.worker, watched.server):
        sighting = state_of(watched.master).roster.seen(id, 31.0)
        assert not sighting.accepted
        assert "no heartbeat for 30 s" in sighting.reason


def test_what_prepares_for_the_next_job_may_be_silent():
    watched = Watched()
    watched.master.server.begin_job(state_of(watched.master).settings)
    watched.look(*range(10, 400, 10))
    assert watched.backend.killed == []


def test_master_that_was_stopped_itself_misses_nobody_for_it():
    watched = Watched()
    watched.look(10.0, 100.0, 110.0, 120.0)
    assert watched.backend.killed == []
    watched.look(130.0)
    assert watched.backend.killed == [("ps", 0)]


@pytest.mark.parametrize("end", ["over", "closing"])
def test_nobody_is_missed_when_the_job_is_over(end):
    watched = Watched()
    state = state_of(watched.master)
    setattr(state, end, True)
    watched.look(10.0, 20.0, 30.0)
    assert watched.backend.killed == []


def test_silent_server_without_a_restart_left_ends_the_job():
    watched = Watched(max_ps_restarts=0)
    watched.look(10.0, 20.0, 30.0)
    assert "max_ps_restarts=0" in str(state_of(watched.master).error)
