"""What became of a pod, told apart by its status and its events."""

from __future__ import annotations

import pytest

from elasticcb.cluster.kubernetes.fate import ENDED, HELD_UP, HOPELESS, TAKEN_AWAY, Fate, verdict

LEAVING = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


def pod(phase="Pending", state=None, conditions=(), metadata=None, **status):
    container = {"name": "elasticcb", "image": "zoo:1", "resources": {"limits": {"memory": "64Mi"}}}
    statuses = [{"name": "elasticcb", "state": state}] if state else []
    status = {"phase": phase, "conditions": list(conditions), "containerStatuses": statuses, **status}
    return {"metadata": metadata or {}, "spec": {"containers": [container]}, "status": status}


def waiting(reason, message=""):
    return pod(state={"waiting": {"reason": reason, "message": message}})


def terminated(code, reason="Error", **more):
    return pod("Failed" if code else "Succeeded", {"terminated": {"exitCode": code, "reason": reason}}, **more)


def disrupted(reason, message):
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return terminated(143, conditions=[condition], metadata=LEAVING)


def unscheduled(message):
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


def event(reason, message):
    return {"reason": reason, "message": message}


NO_ROOM = "0/1 nodes are available: 1 Insufficient cpu."
CASES = [
    (pod(), (), False, Fate.WAITING, "it is starting"),
    (waiting("ContainerCreating"), (), False, Fate.WAITING, "it is starting"),
    (pod("Running", {"running": {}}), (), False, Fate.RUNNING, "it runs"),
    (pod("Running", {"running": {}}, metadata=LEAVING), (), False, Fate.RUNNING, "it runs"),
    (unscheduled(NO_ROOM), (), False, Fate.UNSCHEDULABLE, f"it waits for resources: {NO_ROOM[:-1]}"),
    (unscheduled('persistentvolumeclaim "data" not found'), (), False, Fate.UNSCHEDULABLE,
     'no node accepts it: persistentvolumeclaim "data" not found'),
    (waiting("ErrImageNeverPull"), (), False, Fate.WRONG_IMAGE,
     "the image zoo:1 is not on its node, and the pull policy forbids pulling it"),
    (waiting("InvalidImageName"), (), False, Fate.WRONG_IMAGE, "the image zoo:1 is not a valid image name"),
    (waiting("ErrImagePull", "manifest for zoo:1 not found"), (), False, Fate.WRONG_IMAGE,
     "the image zoo:1 can't be pulled: manifest for zoo:1 not found"),
    (waiting("ImagePullBackOff", "Back-off"), (), False, Fate.NO_IMAGE, "the image zoo:1 can't be pulled: Back-off"),
    (waiting("CreateContainerConfigError", 'secret "x" not found'), (), False, Fate.CANNOT_START,
     'its container can\'t be created: secret "x" not found'),
    (waiting("ContainerCreating"), [event("FailedMount", "hostPath type check failed")], False, Fate.NO_VOLUME,
     "a volume can't be mounted: hostPath type check failed"),
    (waiting("CrashLoopBackOff", "back-off 10s"), (), False, Fate.CRASH_LOOPING,
     "it keeps ending immediately after its start: back-off 10s"),
    (terminated(0, "Completed"), (), False, Fate.COMPLETED, "exit code 0"),
    (terminated(3), (), False, Fate.FAILED, "exit code 3"),
    (terminated(137), (), False, Fate.KILLED, "killed by SIGKILL"),
    (terminated(128, "StartError", ), (), False, Fate.CANNOT_START, "its container can't be started"),
    (terminated(137, "OOMKilled"), (), False, Fate.OOM_KILLED,
     "it ran out of memory, limit 64Mi (OOMKilled)"),
    (pod("Failed", reason="Evicted", message="The node was low on resource: memory. "), (), False, Fate.EVICTED,
     "its node evicted it: The node was low on resource: memory"),
    (pod("Failed", reason="OutOfcpu", message="Node didn't have enough"), (), False, Fate.DRAINED,
     "its node refused it (OutOfcpu): Node didn't have enough"),
    (disrupted("PreemptionByScheduler", "default-scheduler: preempting"), (), False, Fate.PREEMPTED,
     "it was preempted by a pod of higher priority: default-scheduler: preempting"),
    (disrupted("EvictionByEvictionAPI", ""), (), False, Fate.DRAINED,
     "it was evicted, for example because its node is being drained"),
    (disrupted("DeletionByPodGC", ""), (), False, Fate.NODE_LOST, "its node is gone"),
    (terminated(143, metadata=LEAVING), [event("Preempted", "Preempted by a/b on node n")], False, Fate.PREEMPTED,
     "it was preempted by a pod of higher priority: Preempted by a/b on node n"),
    (terminated(0, "Completed", metadata=LEAVING), (), False, Fate.DELETED, "its pod was deleted"),
    (pod("Running", {"running": {}}), [event("TaintManagerEviction", "")], True, Fate.DRAINED,
     "its node has a taint that it does not tolerate"),
    (pod("Running", {"running": {}}), (), True, Fate.DELETED, "its pod was deleted"),
    ({}, (), True, Fate.DELETED, "its pod was deleted"),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "events", "gone", "fate", "words"), CASES)
def test_fate_of_a_pod(seen, events, gone, fate, words):
    found = verdict(seen, events, gone)
    assert (found.fate, found.words) == (fate, words)


def test_every_fate_is_told_by_some_status():
    assert {case[3] for case in CASES} == set(Fate)


def test_what_follows_from_a_fate_is_decided_for_each():
    assert TAKEN_AWAY < ENDED
    assert HOPELESS < HELD_UP
    assert not ENDED & HELD_UP
    assert set(Fate) - ENDED - HELD_UP == {Fate.WAITING, Fate.RUNNING}
