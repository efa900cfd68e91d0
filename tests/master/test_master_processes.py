"""What becomes of the ends of processes; no process is started."""

import pytest

from elasticcb.cluster.base import ClusterBackend, Exit
from elasticcb.errors import ClusterLostError, JobFailedError
from elasticcb.master.master_server import MasterServer
from elasticcb.master.members import PlaceState, Role
from elasticcb.master.processes import Processes
from elasticcb.master.roster import Roster
from elasticcb.settings import ClusterSettings


class Backend(ClusterBackend):
    def __init__(self):
        self.started = []
        self.exits = []
        self.waiting = {}

    def pending(self):
        return self.waiting

    def start(self, role, index, master_address):
        self.started.append((role, index))

    def poll(self):
        exits, self.exits = self.exits, []
        return exits

    def kill(self, role, index):
        raise AssertionError("nothing hangs here")

    def stop(self, grace_seconds):
        raise AssertionError("nothing is stopped here")

    def log_tail(self, role, index, lines=30):
        return f"what {role} {index} said last"


class Job:
    """A roster, its processes, and what they told."""

    def __init__(self, num_workers=1, num_ps=0):
        self.roster = Roster(num_workers, num_ps, max_worker_restarts=5, max_ps_restarts=1)
        self.backend = Backend()
        self.lost = []
        self.lost_ps = []
        self.lines = []
        self.processes = Processes(self.roster, self.backend, self.lost.append, self.lost_ps.append, self.lines.append)
        self.processes.start_missing("master:1")

    def register(self, role=Role.WORKER, index=0, pid=1):
        return self.roster.register(role, index, "", pid, "here", now=0.0)

    def ends(self, role="worker", index=0, reason="exit code 1", failed=True, taken_away=False):
        self.backend.exits.append(Exit(role, index, 1, reason, failed, taken_away=taken_away))


def test_process_that_fails_before_it_registers_ends_the_job_with_its_last_words():
    job = Job()
    job.ends()
    with pytest.raises(JobFailedError, match=r"(?s)worker 0 .*exit code 1.*worker 0 said last"):
        job.processes.check()


@pytest.mark.parametrize("reason", ["killed by SIGKILL", "exit code 0"])
def test_worker_that_ends_before_it_registers_without_an_error_of_its_own_is_replaced(reason):
    job = Job()
    job.ends(reason=reason, failed=False)
    job.processes.check()
    job.processes.start_missing("master:1")
    assert job.backend.started == [("worker", 0), ("worker", 0)]
    assert "restart 1 of 5" in job.lines[0]


def test_end_of_a_worker_that_told_of_its_error_is_not_taken_for_a_failed_start():
    job = Job()
    member = job.register()
    job.processes.lost(member.id, "no connection")
    job.ends()  # seen before another one is started in its place
    job.processes.check()
    assert job.lost == [member.id]
    assert job.roster.state(Role.WORKER, 0) is PlaceState.PLANNED


@pytest.mark.parametrize("failed", [True, False])
def test_process_whose_place_is_gone_may_end_with_any_exit_code(failed):
    job = Job(num_workers=2)
    for index in range(2):
        job.register(index=index)
    job.roster.resize(Role.WORKER, 1)
    job.roster.left(2)
    job.ends(index=1, failed=failed)
    job.processes.check()
    assert job.roster.losses.lost[Role.WORKER] == 0


def test_process_that_another_master_gave_up_may_end_with_any_exit_code_and_its_successor_may_not():
    job = Job()
    job.processes.lost(job.register().id, "it gave no sign of life")
    job.processes.take_over({("worker", 0): 1})
    job.ends()  # told that it is no longer part of the job
    job.processes.check()
    job.processes.start_missing("master:1")
    job.ends()
    with pytest.raises(JobFailedError, match="could not start"):
        job.processes.check()


@pytest.mark.parametrize("registered", [True, False])
def test_lost_parameter_server_is_replaced(registered):
    job = Job(num_ps=1)
    if registered:
        job.register(Role.PS)
    job.ends("ps", reason="killed by SIGKILL", failed=False)
    job.processes.check()
    assert (job.lost, job.lost_ps) == ([], [0])
    assert job.roster.to_start() == [(Role.PS, 0)]
    assert "restart 1 of 1" in job.lines[0]
    job.processes.start_missing("master:1")
    job.ends("ps", reason="killed by SIGKILL", failed=False)
    with pytest.raises(JobFailedError, match=r"parameter server 0 .*killed by SIGKILL.*max_ps_restarts.* used up"):
        job.processes.check()


def test_loss_that_ends_the_job_is_told_again_where_the_first_to_hear_of_it_has_passed_over_it():
    backend = Backend()
    server = MasterServer(ClusterSettings(num_workers=0, num_ps=1, max_ps_restarts=0), backend, print)
    server.tend()
    with server.state() as state:
        state.roster.register(Role.PS, 0, "", 1, "here", now=0.0)
    backend.exits.append(Exit("ps", 0, 1, "signal 9", True))
    for _ in range(2):
        with pytest.raises(ClusterLostError, match="signal 9"):
            server.tend()


def test_worker_that_dies_after_its_last_task_is_gone_and_nobody_hears_of_a_restart():
    job = Job()
    job.register()
    job.ends(reason="killed by SIGKILL", failed=False)
    job.processes.note_ended()
    assert job.roster.up(Role.WORKER) == []
    assert job.roster.losses.lost[Role.WORKER] == 1
    assert job.lines == []


def test_processes_that_wait_for_room_are_told_once_and_again_when_that_changes():
    job = Job(num_workers=3, num_ps=1)
    job.backend.waiting = {("worker", 2): "no CPU is free", ("ps", 0): "no CPU is free"}
    job.processes.check()
    job.processes.check()
    assert [line.partition(": ")[2] for line in job.lines] == ["parameter server 0, worker 2 (no CPU is free)."]
    del job.backend.waiting["ps", 0]
    job.processes.check()
    assert job.lines[1:] == ["Not started yet: worker 2 (no CPU is free)."]
    job.backend.waiting = {}
    job.processes.check()
    assert len(job.lines) == 2


def test_processes_that_lose_their_places_to_others_are_replaced_and_use_up_no_restart():
    job = Job(num_ps=1)
    for pid in range(1, 4):  # more often than there are restarts of a server
        job.register(Role.PS, pid=pid)
        job.ends("ps", reason="its node is lost", failed=False, taken_away=True)
        job.processes.check()
        assert "its node is lost" in job.lines[-1]
        job.processes.start_missing("master:1")
    job.ends("ps", reason="its node is lost", failed=False, taken_away=True)  # before it registered
    job.processes.check()
    assert job.lost_ps == [0] * 4
