"""The Lease that a job's master on Kubernetes holds: at most one acts, whatever becomes of the others."""

from __future__ import annotations

import json
import threading
import time

import pytest
from waiting import wait_until

from elasticcb.cluster.kubernetes import master_pod
from elasticcb.cluster.kubernetes.api import KubernetesError
from elasticcb.cluster.kubernetes.master_pod import MasterLease, held
from elasticcb.errors import GO_ON

ENDED = {"containerStatuses": [{"state": {"terminated": {"exitCode": 137}}}]}
RUNS = {"containerStatuses": [{"state": {"running": {}}}]}


class API:
    """An API server with one Lease, and some pods."""

    def __init__(self):
        self.spec, self.version, self.pods = {"leaseDurationSeconds": 60}, 1, {}
        self.is_away = self.is_deleted = False
        self.before_patch = self.before_answer = lambda: None

    def read(self, kind, name):
        self._check()
        self.before_answer()
        if kind == "Pod":
            if name not in self.pods:
                raise KubernetesError("no such pod", 404)
            return {"status": self.pods[name]}
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.spec)}

    def patch(self, kind, name, patch):
        self._check()
        self.before_patch()
        if patch["metadata"]["resourceVersion"] != str(self.version):
            raise KubernetesError("it was changed", 409)
        return self.write(**patch["spec"])

    def write(self, **spec):
        self.spec, self.version = self.spec | spec, self.version + 1
        return self.read("Lease", "job")

    def _check(self):
        if self.is_away:
            raise KubernetesError("no answer")
        if self.is_deleted:
            raise KubernetesError("no such Lease", 404)


@pytest.fixture
def api():
    return API()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_lease_that_nobody_holds_is_taken(api, clock):
    assert MasterLease(api, "job", "a", clock).take_if_free() == "a"
    assert (api.spec["holderIdentity"], api.spec["leaseTransitions"]) == ("a", 1)
    assert api.spec["renewTime"].endswith("Z")


def test_another_waits_until_it_was_not_renewed_for_so_long_as_it_lasts_by_its_own_clock(api, clock):
    first, second = (MasterLease(api, "job", name, clock) for name in "ab")
    first.take_if_free()
    api.pods["a"] = RUNS
    for _ in range(5):
        assert second.take_if_free() == "a"
        clock.now += 40.0
        assert first.renew()
    assert second.take_if_free() == "a"
    clock.now += 59.0
    assert second.take_if_free() == "a"
    clock.now += 1.0
    assert second.take_if_free() == "b"
    assert api.spec["leaseTransitions"] == 2
    assert not first.renew()


def test_the_time_that_an_answer_takes_does_not_make_a_lease_older(api, clock):
    MasterLease(api, "job", "a", clock).take_if_free()
    second = MasterLease(api, "job", "b", clock)

    def renewed_before_a_slow_answer():
        clock.now += 50.0
        api.version += 1

    api.before_answer = renewed_before_a_slow_answer
    assert second.take_if_free() == "a"
    api.before_answer = lambda: None
    clock.now += 20.0
    assert second.take_if_free() == "a"


def test_a_holder_acts_no_more_before_another_may(api, clock):
    first = MasterLease(api, "job", "a", clock)
    first.take_if_free()
    api.is_away = True
    clock.now += 45.0
    assert not first.is_late
    with pytest.raises(KubernetesError):
        first.renew()
    clock.now += 1.0
    assert first.is_late
    api.is_away = False
    assert not first.renew()  # though nobody has taken it yet
    assert master_pod._GIVE_UP_SECONDS + master_pod._LOOK_SECONDS < master_pod.LEASE_SECONDS


@pytest.mark.parametrize(("pod", "taken"), [(ENDED, True), (RUNS, False), ({}, False), (None, False)])
def test_it_is_taken_at_once_from_a_pod_only_if_its_node_tells_that_it_has_ended(api, clock, pod, taken):
    MasterLease(api, "job", "a", clock).take_if_free()
    if pod is not None:
        api.pods["a"] = pod
    assert MasterLease(api, "job", "b", clock).take_if_free() == ("b" if taken else "a")


def test_the_next_container_of_a_pod_has_it_at_once(api, clock):
    MasterLease(api, "job", "a", clock).take_if_free()
    again = MasterLease(api, "job", "a", clock)
    assert again.take_if_free() == "a"
    assert api.spec["leaseTransitions"] == 1
    assert again.renew()


def test_of_two_that_take_it_at_once_one_has_it(api, clock):
    first, second = (MasterLease(api, "job", name, clock) for name in "ab")

    def second_is_quicker():
        api.before_patch = lambda: None
        assert second.take_if_free() == "b"

    api.before_patch = second_is_quicker
    assert first.take_if_free() != "a"
    assert first.take_if_free() == "b"
    assert api.spec["holderIdentity"] == "b"


def test_it_is_held_on_when_somebody_else_changes_something_else_of_it(api, clock):
    lease = MasterLease(api, "job", "a", clock)
    lease.take_if_free()
    api.write(leaseDurationSeconds=30)
    assert lease.renew()
    api.write(holderIdentity="b")
    assert not lease.renew()


def test_one_that_was_deleted_is_not_lost_before_it_is_late(api, clock):
    lease = MasterLease(api, "job", "a", clock)
    lease.take_if_free()
    api.is_deleted = True
    with pytest.raises(KubernetesError):
        lease.renew()
    clock.now += 46.0
    assert not lease.renew()


def test_one_that_is_given_up_is_free_and_another_s_is_left_alone(api, clock):
    first, second = (MasterLease(api, "job", name, clock) for name in "ab")
    first.take_if_free()
    first.release()
    assert second.take_if_free() == "b"
    first.release()
    assert api.spec["holderIdentity"] == "b"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(master_pod, "_RENEW_SECONDS", 0.01)
    monkeypatch.setattr(master_pod, "_LOOK_SECONDS", 0.01)


@pytest.fixture
def ended():
    """Exit codes of this process, which does not end, and when there is one."""

    class Ended(list):
        there = threading.Event()

        def __call__(self, code):
            self.append(code)
            self.there.set()

    ended = Ended()
    ended.there.clear()
    return ended


def test_it_is_renewed_beside_the_work_and_given_up_after_it(api, quick, ended):
    with held(MasterLease(api, "job", "a"), [].append, ended):
        before = api.version
        wait_until(lambda: api.version >= before + 3)
        assert api.spec["holderIdentity"] == "a"
    assert api.spec["holderIdentity"] == ""
    assert not ended


def test_a_process_ends_at_once_when_another_has_its_lease(api, quick, ended):
    said = []
    with held(MasterLease(api, "job", "a"), said.append, ended):
        api.write(holderIdentity="b")
        assert ended.there.wait(20)
    assert ended == [GO_ON]
    assert "has lost its Lease" in said[0]
    assert api.spec["holderIdentity"] == "b"


def test_a_process_ends_when_it_can_not_renew_its_lease_in_time(api, quick, ended, monkeypatch):
    monkeypatch.setattr(master_pod, "_GIVE_UP_SECONDS", 0.2)
    with held(MasterLease(api, "job", "a"), [].append, ended):
        api.is_away = True
        assert ended.there.wait(20)
        api.is_away = False
    assert ended == [GO_ON]
    assert api.spec["holderIdentity"] == "a"  # it is not this process's to give up


def test_a_call_that_hangs_does_not_keep_a_process_from_ending(api, quick, ended, monkeypatch):
    monkeypatch.setattr(master_pod, "_GIVE_UP_SECONDS", 0.2)
    monkeypatch.setattr(master_pod, "_JOIN_SECONDS", 0.2)
    with held(MasterLease(api, "job", "a"), [].append, ended):
        api.before_patch = lambda: time.sleep(30)
        assert ended.there.wait(20)


def fail(text):
    raise BrokenPipeError


def hang(text):
    time.sleep(30)


@pytest.mark.parametrize("say", [fail, hang])
def test_a_process_ends_also_if_it_can_not_say_why(api, quick, ended, monkeypatch, say):
    monkeypatch.setattr(master_pod, "_SAY_SECONDS", 0.1)
    monkeypatch.setattr(master_pod, "_JOIN_SECONDS", 0.1)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # a process that ends shows none
    with held(MasterLease(api, "job", "a"), say, ended):
        api.write(holderIdentity="b")
        assert ended.there.wait(20)
    assert set(ended) == {GO_ON}


def test_it_is_renewed_after_an_answer_that_is_not_one_of_the_api_server(api, quick, ended):
    def refuse_once():
        api.before_patch = lambda: None
        return json.loads("<html>")

    with held(MasterLease(api, "job", "a"), [].append, ended):
        before = api.version
        api.before_patch = refuse_once
        wait_until(lambda: api.version > before + 2)
    assert not ended


def test_one_that_waits_says_so_once_and_begins_when_the_other_has_ended(api, quick, ended):
    said = []
    MasterLease(api, "job", "old").take_if_free()
    api.pods["old"] = RUNS
    seen = []
    api.before_answer = lambda: seen.append(api.spec["holderIdentity"])

    def end_later():
        wait_until(lambda: len(seen) > 10)
        api.pods["old"] = ENDED

    thread = threading.Thread(target=end_later)
    thread.start()
    with held(MasterLease(api, "job", "new"), said.append, ended):
        assert api.spec["holderIdentity"] == "new"
    thread.join()
    assert set(seen[:10]) == {"old"}
    assert said == ["The master in the pod old may still act; waiting for its end."]
